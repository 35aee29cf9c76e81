"""What is made out of a text, however it is written."""

import pytest

from comfyui_h3.h3core.prompt.parse import parse

BASE = (
    "integrated_multimodal_description: [Shot 1] Live-action, a diver (S1) says: <d>[French] On y va.</d> "
    "[Shot 2] At 01:02.345, the camera cuts to bubbles.\n\noverall_soundscape: Water.\n\nnon_diegetic_music: N/A"
)


def test_sections_have_their_bodies():
    parsed = parse(BASE)
    assert [section.name for section in parsed.sections] == [
        "integrated_multimodal_description",
        "overall_soundscape",
        "non_diegetic_music",
    ]
    assert all(section.exact for section in parsed.sections)
    assert parsed.body(parsed.section("overall_soundscape")) == " Water.\n\n"
    assert parsed.opening == ""


def test_sections_are_found_after_any_line_end():
    for end in ("\n", "\r\n", "\r"):
        parsed = parse(BASE.replace("\n", end))
        assert [section.exact for section in parsed.sections] == [True, True, True]


@pytest.mark.parametrize(
    "head",
    [
        "Overall_Soundscape:",
        "overall soundscape:",
        "**overall_soundscape:**",
        "## overall_soundscape:",
        "overall_soundscape：",
        " overall_soundscape:",
        "overall_soundscape :",
    ],
)
def test_head_that_is_not_exact_is_found_and_told_apart(head):
    section = parse(BASE.replace("overall_soundscape:", head)).section("overall_soundscape")
    assert section is not None
    assert not section.exact


def test_head_within_a_line_is_no_exact_head():
    parsed = parse(BASE.replace("\n\n", " "))
    assert [section.exact for section in parsed.sections] == [True, False, False]


def test_word_summary_in_a_sentence_is_no_section():
    assert not parse("In summary: a cat sleeps.").sections


def test_shots_have_numbers_times_and_ends():
    first, second = parse(BASE).shots
    assert (first.number, first.time, first.time_ms, first.exact) == (1, None, None, True)
    assert (second.number, second.time, second.time_ms) == (2, " At 01:02.345", 62_345)
    assert BASE[second.body : second.end] == ", the camera cuts to bubbles.\n\n"
    assert first.end == second.start


@pytest.mark.parametrize(
    "marker", ["[shot 2]", "[Shot2]", "[Shot 02]", "［Shot 2］", "【Shot 2】", "[Shot two]", "[Shot 2"]
)
def test_marker_that_is_not_exact_is_still_a_shot(marker):
    shots = parse(BASE.replace("[Shot 2]", marker)).shots
    assert [shot.exact for shot in shots] == [True, False]


@pytest.mark.parametrize(
    "time", ["At 1:02.345", "at 01:02.345", "At 01:02", "01:02.345", "At 62.345", "At 01:62.345", "At 3 s"]
)
def test_time_that_is_not_exact_has_no_milliseconds(time):
    shot = parse(BASE.replace("At 01:02.345", time)).shots[1]
    assert shot.time is not None
    assert shot.time_ms is None


def test_shot_named_inside_a_sentence_is_a_mention():
    parsed = parse(BASE.replace("to bubbles", "to the diver from [Shot 1] again"))
    assert len(parsed.shots) == 2
    assert len(parsed.mentions) == 1


def test_time_of_day_in_the_first_shot_is_no_cut():
    assert parse("integrated_multimodal_description: [Shot 1] At 3:15 p.m. a street").shots[0].time is None
    assert parse("integrated_multimodal_description: [Shot 1] At 00:01.000, a street").shots[0].time is not None


def test_dialogue_has_language_and_words():
    (line,) = parse(BASE).dialogues
    assert (line.language, line.closed, BASE[line.words : line.close]) == ("French", True, " On y va.")


def test_unbalanced_dialogue_is_taken_apart():
    parsed = parse("<d>[English] a <d>[English] b</d> </d> <d>c")
    assert [line.closed for line in parsed.dialogues] == [False, True, False]
    assert len(parsed.stray) == 1


def test_labels_and_speakers():
    parsed = parse("<Subject 1> (S1) and <Picture 12>, <image 3>, <Video 2 says (s2) (S1,S2) (S1, S3) a < 3 <5> <d>")
    assert [(label.kind, label.number, label.exact) for label in parsed.labels] == [
        ("Subject", 1, True),
        ("Picture", 12, True),
        ("image", 3, False),
        ("Video", 2, False),
    ]
    assert [(speaker.numbers, speaker.exact) for speaker in parsed.speakers] == [
        ((1,), True),
        ((2,), False),
        ((1, 2), True),
        ((1, 3), False),
    ]


def test_bare_pictures_are_those_without_brackets():
    assert [number for number, _ in parse("Picture 1 and <Picture 2>, Picture 3.").bare_pictures] == [1, 3]


def test_lines_are_counted_with_every_line_end():
    parsed = parse("a\nb\r\nc\rd")
    assert [parsed.line_of(place) for place in (0, 2, 5, 7)] == [1, 2, 3, 4]


@pytest.mark.parametrize("text", ["", " ", "\n", "<", "[", "\x00", "\ud800", "[Shot", "<d>", "</d>", "🌧", "مرحبا"])
def test_any_text_is_taken_apart(text):
    parsed = parse(text)
    assert parsed.text == text
    assert not parsed.sections
