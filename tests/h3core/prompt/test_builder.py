"""Fields -> text: the format's strings byte for byte, the user's words verbatim, and what cannot be expressed."""

import dataclasses

import pytest

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.prompt import (
    MODES,
    BasePrompt,
    PromptContext,
    ReferencePrompt,
    Shot,
    build,
    check,
    read_lines,
    read_shots,
    read_task_types,
)

FIELDS = BasePrompt(
    shots=(
        Shot(text="Live-action, static. A fox crosses a frozen pond."),
        Shot(text="the camera cuts to its paws on the ice.", start_ms=3200),
    ),
    overall_soundscape="Ice creaks. Wind passes.",
    non_diegetic_music="A celesta at a slow tempo.",
)
REFERENCE = ReferencePrompt(
    definitions=("<Subject 1> is the fox in <Picture 1>.", "<Audio 1> is the sound of the wind."),
    task_types=("reference generation", "audio reuse"),
    summary="The target video shows <Subject 1> on a pond with <Audio 1>.",
    retention=(
        "<Subject 1> (appears in [Shot 1], [Shot 2]): fully_preserved - its fur is kept.",
        "<Audio 1>: partially_copy - the wind is reused.",
    ),
    style="The target video is in a realistic style.",
    shots=FIELDS.shots,
    overall_soundscape=FIELDS.overall_soundscape,
)
BODY = (
    "integrated_multimodal_description: [Shot 1] Live-action, static. A fox crosses a frozen pond. "
    "[Shot 2] At 00:03.200, the camera cuts to its paws on the ice.\n\n"
    "overall_soundscape: Ice creaks. Wind passes.\n\n"
    "non_diegetic_music: A celesta at a slow tempo."
)


def context(mode="t2va", num_frames=124, **media):
    return PromptContext(mode=mode, num_frames=num_frames, **media)


def test_text_alone_has_no_first_line():
    assert build(FIELDS, context()) == BODY


@pytest.mark.parametrize(
    ("mode", "line"),
    [
        (
            "first",
            "For the target video, at 0.00 seconds into the target video, <Picture 1> (from [Shot 1]) is fully "
            "referenced.",
        ),
        (
            "first_last",
            "How the reference pictures align with the target video \u2014 Picture 1 (from Shot 1) aligns with the "
            "0.00-second mark of the target video; Picture 2 (from Shot 2) aligns with the 5.17-second mark of the "
            "target video.",
        ),
        (
            "last",
            "How the reference pictures align with the target video \u2014 <Picture 1> (from [Shot 2]) aligns with the "
            "5.17-second mark of the target video.",
        ),
    ],
)
def test_keyframes_have_their_first_line(mode, line):
    assert build(FIELDS, context(mode)) == f"{line}\n\n{BODY}"


@pytest.mark.parametrize(("num_frames", "seconds"), [(107, "4.46"), (192, "8.00"), (243, "10.12"), (362, "15.08")])
def test_first_line_states_the_duration_that_runs(num_frames, seconds):
    assert f" {seconds}-second mark" in build(FIELDS, context("last", num_frames)).splitlines()[0]


def test_references_have_six_sections():
    assert build(REFERENCE, context("ref2va")) == (
        "subject_definitions:\n<Subject 1> is the fox in <Picture 1>.\n<Audio 1> is the sound of the wind.\n\n"
        "summary:\n[reference generation + audio reuse] "
        "The target video shows <Subject 1> on a pond with <Audio 1>.\n\n"
        "retention_analysis:\n<Subject 1> (appears in [Shot 1], [Shot 2]): fully_preserved - its fur is kept.\n"
        "<Audio 1>: partially_copy - the wind is reused.\n\n"
        "detailed_description:\nThe target video is in a realistic style.\n"
        "[Shot 1] Live-action, static. A fox crosses a frozen pond.\n"
        "[Shot 2] At 00:03.200, the camera cuts to its paws on the ice.\n\n"
        "overall_soundscape:\nIce creaks. Wind passes.\n\nnon_diegetic_music:\nN/A"
    )


@pytest.mark.parametrize("mode", MODES)
def test_what_is_built_passes_the_checks(mode):
    fields = REFERENCE if mode == "ref2va" else FIELDS
    assert not check(build(fields, context(mode)), context(mode)).findings


@pytest.mark.parametrize("text", ["雨の夜 🌧 “quoted”", "a\u00a0b", "tail  ", "two\nlines", "مرحبا"])
def test_text_of_the_user_is_put_in_verbatim(text):
    assert f"[Shot 1] {text}\n\n" in build(dataclasses.replace(FIELDS, shots=(Shot(text=text),)), context())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shots": ()}, "no shot"),
        ({"shots": (Shot(text=" "),)}, "shot 1 is empty"),
        ({"shots": (Shot(text="a", start_ms=0),)}, "shot 1 has a time"),
        ({"shots": (Shot(text="a"), Shot(text="b"))}, "shot 2 has no time"),
        ({"shots": (Shot(text="a"), Shot(text="b", start_ms=0))}, "times must increase"),
        (
            {"shots": (Shot(text="a"), Shot(text="b", start_ms=900), Shot(text="c", start_ms=900))},
            "times must increase",
        ),
        ({"shots": (Shot(text="a"), Shot(text="b", start_ms=5167))}, "the video ends at 5.17 s"),
        ({"shots": (Shot(text="a [Shot 2] b"),)}, "leave the markers out"),
        ({"shots": (Shot(text="a\noverall_soundscape: b"),)}, "section name 'overall_soundscape:'"),
        ({"overall_soundscape": ""}, "N/A"),
        ({"non_diegetic_music": "\n"}, "non_diegetic_music is empty"),
    ],
)
def test_fields_that_cannot_be_expressed_are_refused(change, words):
    with pytest.raises(RequestError) as info:
        build(dataclasses.replace(FIELDS, **change), context())
    assert words in str(info.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"definitions": ()}, "subject_definitions is empty"),
        ({"definitions": ("<Subject 1> is\na fox",)}, "more than one line"),
        ({"task_types": ()}, "no task type"),
        ({"task_types": ("editing",)}, "'editing' is no task type"),
        ({"task_types": ("audio reuse", "audio reuse")}, "more than once"),
        ({"summary": ""}, "summary is empty"),
        ({"retention": ()}, "retention_analysis is empty"),
        ({"style": ""}, "style is empty"),
    ],
)
def test_reference_fields_that_cannot_be_expressed_are_refused(change, words):
    with pytest.raises(RequestError) as info:
        build(dataclasses.replace(REFERENCE, **change), context("ref2va"))
    assert words in str(info.value)


def test_fields_of_the_other_kind_of_mode_are_refused():
    with pytest.raises(RequestError, match="ReferencePrompt"):
        build(FIELDS, context("ref2va"))
    with pytest.raises(RequestError, match="BasePrompt"):
        build(REFERENCE, context("first"))


def test_more_than_two_keyframes_have_no_first_line():
    with pytest.raises(RequestError, match="no first line for these 3 keyframes"):
        build(FIELDS, context("first_last", num_pictures=3))


@pytest.mark.parametrize(
    "second",
    [
        "00:03.200 the rest",
        "00:03.200, the rest",
        "0:03.2 the rest",
        "3.2 s the rest",
        "3.2s, the rest",
        "At 00:03.200, the rest",
    ],
)
def test_paragraphs_are_shots(second):
    for gap in ("\n\n", "\r\n\r\n", "\n \t\n\n"):
        shots = read_shots(f"  the first\nits second line{gap}{second}\n")
        assert shots == (Shot(text="the first\nits second line"), Shot(text="the rest", start_ms=3200))


def test_words_that_only_begin_with_a_number_are_no_time():
    for text in ("3 men walk", "3.5 metres up", "7 seconds pass", "10s and 20s style"):
        if text.startswith("10s"):
            assert read_shots(text)[0].start_ms == 10_000  # a number with s is a time
        else:
            assert read_shots(text) == (Shot(text=text),)


@pytest.mark.parametrize("text", ["0:3.2 a", "00:61.000 a", "00:03.2001 a", "00:03:200 a"])
def test_time_that_cannot_be_read_is_refused(text):
    with pytest.raises(RequestError, match="00:"):
        read_shots(text)


def test_empty_text_has_no_shots_lines_or_types():
    assert (read_shots(" \n\n "), read_lines("\r\n \n"), read_task_types("[]")) == ((), (), ())


@pytest.mark.parametrize(
    "text", ["[audio reuse + video editing]", "audio reuse+video editing", "audio reuse, video editing"]
)
def test_task_types_are_read_with_or_without_brackets(text):
    assert read_task_types(text) == ("audio reuse", "video editing")
