"""Each check of a prompt: what it finds, and that it is silent on prompts that follow every rule."""

import json
import time
from pathlib import Path

import pytest
import torch

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.models.text_encoder.template import CONTROL_TOKENS
from comfyui_h3.h3core.prompt import MODES, PromptContext, check, context_for, detect_mode
from comfyui_h3.h3core.types import Condition, EncodedMedia, EncodedMedium, ResolvedRequest

BODY = """\
integrated_multimodal_description: [Shot 1] Live-action, cinematic, soft noon light. A wide shot frames a clockmaker \
(S1), a thin man with round glasses, bent over an open pocket watch at a bench. The camera pushes in with small \
amplitude at slow speed while he lowers a tiny gear into place and says in a dry, quiet voice: <d>[English] Listen. It \
breathes again.</d> [Shot 2] At 00:02.500, the camera cuts to a close-up of the moving balance wheel, static, under a \
sign reading "OPEN". [Shot 3] At 00:04.000, the shot switches to his apprentice (S2), a girl with red hair, who laughs \
and answers: <d>[German] Endlich!</d>

overall_soundscape: A fine, even ticking fills the room. Metal tools touch the bench, and a cart rolls past outside.

non_diegetic_music: A solo clarinet at a slow tempo, joined by quiet plucked strings."""
ALIGN = "How the reference pictures align with the target video \u2014 "
FIRST = (
    "For the target video, at 0.00 seconds into the target video, <Picture 1> (from [Shot 1]) is fully referenced.\n\n"
)
FIRST_LAST = (
    f"{ALIGN}Picture 1 (from Shot 1) aligns with the 0.00-second mark of the target video; Picture 2 (from Shot 3) "
    "aligns with the 5.17-second mark of the target video.\n\n"
)
LAST = f"{ALIGN}<Picture 1> (from [Shot 3]) aligns with the 5.17-second mark of the target video.\n\n"
REFERENCE = """\
subject_definitions:
<Subject 1> is the clockmaker in <Picture 1>, a thin man with round glasses and a grey apron.
<Subject 2> is the workshop in <Picture 2>, with a long bench below a skylight.
<Video 1> is the source of the slow camera path.
<Audio 2> is the voice-timbre reference for <Subject 1> (S1).

summary:
[reference generation + audio reference] The target video shows <Subject 1> at work in <Subject 2>, along the camera \
path of <Video 1> and with the voice of <Audio 2>.

retention_analysis:
<Subject 1> (appears in [Shot 1], [Shot 2]): fully_preserved - face, glasses and apron are kept.
<Subject 2> (appears in [Shot 1]): partially_preserved - the bench is kept, the light is later in the day.
<Video 1> (camera path): weak_reference - only the slow approach is followed.
<Audio 2>: reference - the timbre guides the spoken line and no signal is copied.

detailed_description:
The target video is in a realistic cinematic style with warm, low light.
[Shot 1] A wide shot opens on <Subject 2>, the workshop with its long bench. <Subject 1> (S1), the thin man in the \
grey apron, lifts a watch to his ear and says in the timbre of <Audio 2>, <d>[English] Listen.</d> The camera pushes \
in at slow speed along the path of <Video 1>.
[Shot 2] At 00:03.000, the shot cuts to a close-up of <Subject 1> as he smiles.

overall_soundscape:
A fine, even ticking fills the room.

non_diegetic_music:
N/A"""
GOOD = {
    "t2va": BODY,
    "first": FIRST + BODY,
    "first_last": FIRST_LAST + BODY,
    "last": LAST + BODY,
    "ref2va": REFERENCE,
}
MEDIA = {"num_pictures": 2, "num_videos": 1, "num_audios": 2}


def context(mode="t2va", num_frames=124, **fields):
    return PromptContext(mode=mode, num_frames=num_frames, **({**MEDIA, **fields} if mode == "ref2va" else fields))


def found(prompt, mode="t2va", **fields):
    """{code: level} of everything that is found."""
    return {finding.code: finding.level for finding in check(prompt, context(mode, **fields)).findings}


def changed(old, new, mode="t2va", **fields):
    """What is found when a good prompt is changed in one place."""
    assert old in GOOD[mode]
    return found(GOOD[mode].replace(old, new, 1), mode, **fields)


@pytest.mark.parametrize("mode", MODES)
def test_good_prompt_has_no_findings(mode):
    report = check(GOOD[mode], context(mode))
    assert report.findings == ()
    assert report.text().startswith("0 errors, 0 warnings;")


@pytest.mark.parametrize("mode", MODES)
def test_mode_is_recognised(mode):
    assert detect_mode(GOOD[mode]) == mode


def test_shipped_workflow_has_no_findings():
    graph = json.loads((Path(__file__).parents[3] / "workflows" / "api" / "t2va.json").read_text(encoding="utf-8"))
    (prompt,) = [node["inputs"]["prompt"] for node in graph.values() if node["class_type"] == "H3EncodePrompt"]
    assert not check(prompt, context()).findings


RELEASED = {  # the media of each request script of the release, and its frames
    "t2va": {"mode": "t2va", "num_frames": 243, "requested_s": 10},
    "fl2va": {"mode": "first", "num_frames": 192, "requested_s": 8},
    "ref2va": {"mode": "ref2va", "num_frames": 124, "num_pictures": 0, "num_videos": 1, "num_audios": 2},
}


@pytest.mark.parametrize("task", RELEASED)
def test_prompts_of_the_release_have_no_error(official_data, task):
    script = official_data / "scripts" / "readme" / f"reproducible-768p-{task}-request.sh"
    if not script.is_file():
        pytest.skip(f"the request scripts of the release are not in {official_data}")
    prompt = json.loads(script.read_text(encoding="utf-8").split("<<'JSON'\n")[1].split("\nJSON\n")[0])["prompt"]
    report = check(prompt, PromptContext(**RELEASED[task]))
    assert not report.errors, report.text()
    assert detect_mode(prompt) == report.mode


def test_guide_examples_have_no_error(official_data):
    guide = official_data / "skills" / "h3-prompt-writing" / "references"
    if not guide.is_dir():
        pytest.skip(f"the prompt guide of the release is not in {official_data}")
    blocks = [
        block.split("\n```")[0]
        for name in ("base-en.txt", "ref-en.txt")
        for block in (guide / name).read_text(encoding="utf-8").split("```text\n")[1:]
    ]
    whole = [block for block in blocks if "[Shot 1] " in block and "\nnon_diegetic_music:" in block]
    examples = [block for block in whole if "..." not in block]
    assert [detect_mode(example) for example in examples] == list(MODES)
    frames = (158, 124, 192, 158, 192)
    media = ({}, {}, {}, {}, {"num_pictures": 4, "num_videos": 2, "num_audios": 1})
    for mode, example, num_frames, counts in zip(MODES, examples, frames, media, strict=True):
        report = check(example, PromptContext(mode=mode, num_frames=num_frames, **counts))
        assert not report.errors, report.text()


# Sections


@pytest.mark.parametrize("name", ["integrated_multimodal_description", "overall_soundscape", "non_diegetic_music"])
def test_missing_section_is_an_error(name):
    assert changed(f"{name}:", "something:")["section-missing"] == "error"


@pytest.mark.parametrize(
    "name", ["subject_definitions", "summary", "retention_analysis", "detailed_description", "non_diegetic_music"]
)
def test_missing_section_of_references_is_an_error(name):
    assert changed(f"{name}:", "something:", "ref2va")["section-missing"] == "error"


def test_order_of_sections():
    first, sound, music = BODY.split("\n\n")
    assert found(f"{first}\n\n{music}\n\n{sound}") == {"section-order": "error"}


def test_sections_without_blank_lines_are_right():
    """The release's own text-to-video request has none."""
    assert found(BODY.replace("\n\n", "\n")) == {}


def test_empty_section_is_an_error():
    assert found(BODY[: BODY.index(" A solo clarinet")]) == {"section-empty": "error"}


def test_repeated_section_is_an_error():
    assert found(BODY + "\n\nnon_diegetic_music: N/A") == {"section-repeated": "error"}


@pytest.mark.parametrize(
    "head", ["Overall_soundscape:", "**overall_soundscape:**", "overall soundscape:", " overall_soundscape:"]
)
def test_section_head_must_be_exact(head):
    assert changed("overall_soundscape:", head)["section-head"] == "error"


def test_section_in_the_middle_of_a_line_is_an_error():
    assert found(BODY.replace("\n\n", " ")) == {"section-head": "error"}


def test_main_section_of_the_other_mode_is_an_error():
    assert changed("integrated_multimodal_description:", "detailed_description:")["other-mode"] == "error"
    assert changed("detailed_description:", "integrated_multimodal_description:", "ref2va")["other-mode"] == "error"
    assert found(BODY + "\n\nsummary: [video editing] x")["other-mode"] == "error"


def test_code_fence_is_an_error():
    assert found(f"```\n{BODY}\n```")["code-fence"] == "error"


def test_prose_has_one_error():
    report = check("A cat sleeps on a warm stove.", context())
    assert [finding.code for finding in report.errors] == ["sections-missing"]
    assert "Plain prose" in report.text()
    assert not report.warnings


# First line


@pytest.mark.parametrize("mode", ["first", "first_last", "last"])
def test_absent_first_line_is_a_warning(mode):
    assert found(BODY.replace("a thin man", "a thin man as in Picture 1 and Picture 2, <Picture 1>,"), mode)[
        "first-line-absent"
    ] == ("warning")
    assert found("A cat.", mode)["first-line-absent"] == "warning"


@pytest.mark.parametrize(
    ("mode", "old", "new", "hint"),
    [
        ("first", "0.00 seconds into", "0.0 seconds into", "must be"),
        ("first", "fully referenced.", "fully referenced. ", "spaces around"),
        ("first", "<Picture 1>", "Picture 1", "must be"),
        ("first_last", "\u2014", "-", "U+2014"),
        ("first_last", "Picture 1 (from Shot 1)", "<Picture 1> (from [Shot 1])", "must be"),
        ("last", "\u2014", "\u2013", "U+2014"),
        ("last", "[Shot 3])", "Shot 3)", "must be"),
    ],
)
def test_first_line_is_compared_byte_for_byte(mode, old, new, hint):
    (finding,) = [f for f in check(GOOD[mode].replace(old, new, 1), context(mode)).errors if f.code == "first-line"]
    assert hint in finding.message
    assert finding.line == 1


def test_first_line_of_another_mode_is_an_error():
    assert found(FIRST + BODY, "last")["first-line"] == "error"
    assert found(FIRST + BODY, "t2va")["text-before-sections"] == "error"


@pytest.mark.parametrize("mode", ["first_last", "last"])
def test_first_line_names_the_last_shot(mode):
    assert changed("Shot 3", "Shot 2", mode) == {"first-line-shot": "error"}


@pytest.mark.parametrize("seconds", ["5.17", "5.00", "4.60"])
def test_first_line_states_the_requested_or_the_aligned_duration(seconds):
    assert changed("5.17", seconds, "last") == {}


@pytest.mark.parametrize("seconds", ["5.20", "4.00", "8.00", "0.00", "05.17", "9" * 400 + ".00"])
def test_first_line_with_another_duration_is_an_error(seconds):
    assert changed("5.17", seconds, "last") == {"first-line-duration": "error"}


def test_known_request_leaves_two_durations():
    assert changed("5.17", "5.00", "last", requested_s=5) == {}
    assert changed("5.17", "4.60", "last", requested_s=5) == {"first-line-duration": "error"}


def test_one_blank_line_follows_the_first_line():
    assert changed("\n\n", "\n", "first") == {"first-line-blank": "error"}
    assert changed("\n\n", "\n\n\n", "first") == {"first-line-blank": "warning"}
    assert changed("\n\n", "\n\nA note.\n", "first")["text-before-sections"] == "error"


@pytest.mark.parametrize("mode", ["t2va", "ref2va"])
def test_nothing_stands_before_the_sections(mode):
    assert found("Here is the prompt:\n\n" + GOOD[mode], mode) == {"text-before-sections": "error"}


def test_three_keyframes_have_no_first_line_to_compare_with():
    assert found(FIRST_LAST + BODY, "first_last", num_pictures=3) == {
        "first-line-unknown": "warning",
        "media-uncited": "warning",
    }


# Shots


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("[Shot 1] ", "", "shot-number"),
        ("[Shot 2]", "[Shot 4]", "shot-number"),
        ("[Shot 3]", "[Shot 2]", "shot-number"),
        ("[Shot 2]", "[shot 2]", "shot-marker"),
        ("[Shot 2]", "[Shot2]", "shot-marker"),
        ("[Shot 2]", "【Shot 2】", "shot-marker"),
        ("[Shot 1]", "[Shot 1] At 00:00.000,", "shot-time-first"),
        ("[Shot 2] At 00:02.500, the", "[Shot 2] The", "shot-time-missing"),
        ("At 00:02.500", "At 0:02.5", "shot-time-form"),
        ("At 00:02.500", "at 00:02.500", "shot-time-form"),
        ("At 00:02.500", "At 2.5 s", "shot-time-form"),
        ("At 00:04.000", "At 00:02.500", "shot-time-order"),
        ("At 00:04.000", "At 00:01.000", "shot-time-order"),
        ("At 00:04.000", "At 00:05.167", "shot-time-late"),
        ("At 00:04.000", "At 01:04.000", "shot-time-late"),
    ],
)
def test_shots_are_numbered_and_timed(old, new, code):
    assert changed(old, new)[code] == "error"


def test_prompt_without_shots_is_an_error():
    assert found("integrated_multimodal_description: A cat.\n\noverall_soundscape: N/A\n\nnon_diegetic_music: N/A") == {
        "shot-missing": "error"
    }


def test_shot_just_before_the_end_is_right():
    assert changed("At 00:04.000", "At 00:05.166") == {}


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("his apprentice", "the bench from [Shot 1] and his apprentice", "shot-mention"),
        ("At 00:02.500, the", "At 00:02.500 the", "shot-time-comma"),
        ("[Shot 1]", "A fine day. [Shot 1]", "text-before-shot"),
        ("the camera cuts to a close-up", "we see a close-up", "cut-verb"),
        (
            ', the camera cuts to a close-up of the moving balance wheel, static, under a sign reading "OPEN".',
            ",",
            "shot-empty",
        ),
    ],
)
def test_unusual_shots_are_warnings(old, new, code):
    assert changed(old, new)[code] == "warning"


@pytest.mark.parametrize(
    "cut",
    [
        "the shot cuts to",
        "the shot transitions to",
        "the shot changes to",
        "the shot switches to",
        "a cross-dissolve leads to",
    ],
)
def test_every_cut_of_the_list_is_right(cut):
    assert changed("the camera cuts to", cut) == {}


# Speech


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("</d>", "", "dialogue-unbalanced"),
        ("<d>[English]", "[English]", "dialogue-unbalanced"),
        ("<d>[English]", "<d><d>[English]", "dialogue-unbalanced"),
        ("<d>[English] Listen", "<d>Listen", "dialogue-language"),
        ("<d>[English]", "<d> [English]", "dialogue-language"),
        ("[English]", "[unclear]", "dialogue-language"),
        ("<d>", "<D>", "dialogue-marker"),
        ("<d>", "< d >", "dialogue-marker"),
        ("</d>", "<d/>", "dialogue-marker"),
        ("</d>", "</dialogue>", "dialogue-marker"),
        ("<d>", "&lt;d&gt;", "dialogue-marker"),
        ("<d>[English]", "<d[English]", "dialogue-marker"),
    ],
)
def test_broken_dialogue_is_an_error(old, new, code):
    assert changed(old, new)[code] == "error"


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("[German]", "[Klingon]", "dialogue-language-unusual"),
        ("[German] Endlich!", "[German] ", "dialogue-empty"),
        ("[German] Endlich", "[German]Endlich", "dialogue-space"),
        (" (S1)", "", "speaker-missing"),
        ("(S1)", "(S2)", "speaker-order"),
        ("(S2)", "(S3)", "speaker-order"),
        ("(S2)", "(s2)", "speaker-form"),
        ("(S2)", "(S1, S2)", "speaker-form"),
        ("[German] Endlich!", "[German] Endlich! <scenetrans>", "scenetrans"),
    ],
)
def test_unusual_speech_is_a_warning(old, new, code):
    assert changed(old, new)[code] == "warning"


def test_joint_speakers_and_unclear_words_are_right():
    assert changed("answers:", "both (S1,S2) answer:") == {}
    assert changed("Endlich!", "Endlich, [unclear]! <cutoff>") == {}


def test_words_heard_from_a_sound_need_no_speaker():
    line = "As <Audio 2> reaches <d>[English] Stay.</d> the lamp goes out. The camera pushes"
    assert changed("The camera pushes", line, "ref2va") == {}


@pytest.mark.parametrize("section", ["overall_soundscape: ", "non_diegetic_music: "])
def test_dialogue_outside_the_shots_is_an_error(section):
    assert changed(section, f"{section}He (S1) says <d>[English] Hm.</d> ")["dialogue-place"] == "error"


def test_voiceover_needs_its_phrase_and_closed_lips():
    told = "says in an off-screen voiceover: <d>[English] Listen. It breathes again.</d> while his lips remain closed."
    said = "says in a dry, quiet voice: <d>[English] Listen. It breathes again.</d>"
    assert changed(said, told) == {}
    assert changed(said, told.replace("while his lips remain closed.", "")) == {"voiceover-lips": "warning"}
    assert changed(said, told.replace("says in an off-screen voiceover", "thinks in a voice-over")) == {
        "voiceover-phrase": "warning"
    }


# Labels


@pytest.mark.parametrize(
    ("new", "code"),
    [
        ("<Image 1>", "label-kind"),
        ("<subject 1>", "label-kind"),
        ("<Character 2>", "label-kind"),
        ("<Subject 1 ", "label-open"),
        ("<Subject1>", "label-form"),
        ("<Subject 01>", "label-form"),
        ("<Subject>", "label-form"),
    ],
)
def test_labels_have_four_kinds_and_one_form(new, code):
    assert changed("<Subject 1> as he", f"{new} as he", "ref2va") == {code: "error"}


def test_unknown_tag_is_a_warning():
    assert changed("laughs", "<laughs>") == {"unknown-tag": "warning"}
    assert changed("laughs", "is < 3 and <3 > 2") == {}


def test_undefined_subject_is_an_error():
    assert changed("<Subject 1> as he", "<Subject 3> as he", "ref2va") == {"subject-undefined": "error"}


def test_subject_is_defined_before_it_is_used():
    assert changed("round glasses and a grey apron.", "a grey apron in <Subject 2>.", "ref2va") == {
        "subject-late": "error"
    }


def test_subjects_belong_to_references():
    assert changed("a clockmaker", "<Subject 1>") == {"subject-mode": "error"}


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("<Subject 2> is the workshop", "- <Subject 2> is the workshop", "definition-line"),
        ("<Subject 2> is the workshop", "<Subject 2>: the workshop", "definition-line"),
        ("<Video 1> is the source", "<Subject 2> is the source", "definition-twice"),
    ],
)
def test_unusual_definitions_are_warnings(old, new, code):
    assert changed(old, new, "ref2va")[code] == "warning"


@pytest.mark.parametrize("kind", ["Picture", "Video", "Audio"])
def test_label_without_its_medium_is_an_error(kind):
    assert changed("as he smiles", f"as <{kind} 3> smiles", "ref2va") == {"label-without-media": "error"}
    assert changed("a clockmaker", f"<{kind} 1>") == {"label-without-media": "error"}


def test_bare_picture_counts_with_first_and_last_frame_only():
    assert changed("a clockmaker", "a clockmaker as in Picture 2", "first_last") == {}
    assert changed("a clockmaker", "a clockmaker as in Picture 3", "first_last") == {"label-without-media": "error"}
    assert changed("a clockmaker", "a clockmaker by Picture 9", "first") == {}
    assert changed("a clockmaker", "<Picture 1>", "first_last") == {"picture-brackets": "warning"}


def test_media_that_are_not_named():
    assert found(REFERENCE, "ref2va", num_pictures=3) == {"media-uncited": "warning"}
    without = REFERENCE.replace("<Picture 1>", "a photo").replace("<Picture 2>", "a photo")
    assert found(without, "ref2va") == {"media-uncited": "error"}
    assert found(without, "ref2va", num_pictures=0) == {}
    assert found(BODY, "first")["media-uncited"] == "error"


def test_soundtrack_need_not_be_named():
    assert found(REFERENCE, "ref2va", soundtracks=(1,)) == {}
    assert found(REFERENCE, "ref2va", soundtracks=()) == {"media-uncited": "warning"}
    assert found(REFERENCE, "ref2va", num_audios=3) == {"media-uncited": "warning"}  # one video: one of the two at most


def test_unknown_media_are_not_compared():
    unknown = dict.fromkeys(MEDIA)
    assert found(REFERENCE.replace("<Picture 2>", "<Picture 9>"), "ref2va", **unknown) == {}


# Summary and retention


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("[reference generation + audio reference] ", "", "summary-prefix"),
        ("[reference generation + ", "(reference generation + ", "summary-prefix"),
        ("[reference generation", "[Reference Generation", "summary-type"),
        ("[reference generation", "[style transfer", "summary-type"),
        (" + audio", ", audio", "summary-type"),
        ("[reference generation", "[audio reference", "summary-repeated"),
        ("[reference generation", "[video editing", "summary-edit"),
    ],
)
def test_summary_begins_with_legal_types(old, new, code):
    assert changed(old, new, "ref2va") == {code: "error"}


@pytest.mark.parametrize("end", [".", ", now at night."])
def test_summary_of_an_edit_says_so(end):
    new = f"[video editing + audio reference] The target video is an edited version of <Video 1>{end} It"
    assert changed("[reference generation + audio reference] The target video", new, "ref2va") == {}


@pytest.mark.parametrize("name", ["video editing", "video continuation", "audio reuse", "audio reference"])
def test_task_type_needs_its_medium(name):
    text = REFERENCE.replace("[reference generation + audio reference]", f"[{name}]")
    none = {"num_videos": 0, "num_audios": 0}
    assert found(text, "ref2va", **none)["summary-media"] == "error"
    assert "summary-media" not in found(text, "ref2va")


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("fully_preserved - face", "fully_preserved \u2013 face", "retention-line"),
        ("fully_preserved - face", "fully preserved - face", "retention-line"),
        ("fully_preserved - face", "fully_preserved", "retention-line"),
        ("<Audio 2>: reference", "- <Audio 2>: reference", "retention-line"),
        ("fully_preserved - face", "fully_copy - face", "retention-marker"),
        ("<Audio 2>: reference", "<Audio 2>: fully_preserved", "retention-marker"),
        ("fully_preserved - face", "kept - face", "retention-marker"),
        (
            "<Subject 2> (appears in [Shot 1]): partially",
            "<Subject 1> (appears in [Shot 1]): partially",
            "retention-twice",
        ),
        (
            "<Subject 2> (appears in [Shot 1]): partially",
            "<Subject 1> (appears in [Shot 1]): partially",
            "retention-missing",
        ),
    ],
)
def test_retention_has_one_legal_line_for_each_label(old, new, code):
    assert changed(old, new, "ref2va")[code] == "error"


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("<Subject 2> (appears in [Shot 1])", "<Subject 2> (appears in [Shot 7])", "retention-shots"),
        ("<Subject 2> (appears in [Shot 1])", "<Subject 2>", "retention-shots"),
        ("face, glasses", "(S1), glasses", "retention-speaker"),
        ("<Video 1> is the source of the slow camera path.\n", "", "retention-undefined"),
        ("The target video is in a realistic cinematic style with warm, low light.\n", "", "style-missing"),
    ],
)
def test_unusual_references_are_warnings(old, new, code):
    assert changed(old, new, "ref2va") == {code: "warning"}


# Characters


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("<d>[English]", "\u201c<d>[English]"),
        ("</d>", "</d>\u201d"),
        ("(S1)", "（S1）"),
        ("[Shot 2]", "［Shot 2］"),
        ("<d>", "＜d＞"),
        ("[English]", "【English】"),
        ("[Shot 2]", "[Shot\u00a02]"),
        ("[Shot 2] At", "[Shot 2]\u00a0At"),
        ("[English] Listen", "[English]\u00a0Listen"),
        ("overall_soundscape:", "overall_soundscape："),
    ],
)
def test_lookalike_at_a_marker_is_an_error(old, new):
    assert changed(old, new)["odd-character"] == "error"


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("his apprentice", "the man\u2019s apprentice", "odd-apostrophes"),
        ("soft noon", "soft\u00a0noon", "odd-spaces"),
        ("round glasses", "round （gold） glasses", "odd-brackets"),
        ("soft noon", "soft\u200bnoon", "odd-spaces"),
    ],
)
def test_lookalike_elsewhere_is_a_warning(old, new, code):
    assert changed(old, new) == {code: "warning"}


def test_full_width_colon_before_spoken_words_is_right():
    assert changed("answers: <d>", "answers：<d>") == {}


def test_visible_text_stands_in_plain_quotes():
    assert changed('"OPEN"', "\u201cOPEN\u201d") == {"odd-quotes": "error"}


@pytest.mark.parametrize("words", ["“Endlich” – sagt’s", "「静か」（小声）", "‘Endlich’"])
def test_spoken_words_keep_their_punctuation(words):
    assert changed("Endlich!", words) == {}


def test_visible_text_keeps_its_punctuation():
    assert changed('"OPEN"', '"「営業中」（本日）"') == {}


@pytest.mark.parametrize("token", CONTROL_TOKENS)
def test_control_token_is_an_error(token):
    assert changed("laughs", f"laughs {token}") == {"special-token": "error"}


@pytest.mark.parametrize("token", ["<|cutoff|>", "<|lyrics_start|>", "<|fim_pad|>", "<think>", "<|anything|>"])
def test_other_token_is_a_warning(token):
    assert changed("laughs", f"laughs {token}")["special-token-unusual"] == "warning"


@pytest.mark.parametrize("letter", ["\x00", "\x1b", "\u202e", "\u200f", "\x85"])
def test_invisible_character_is_a_warning(letter):
    assert changed("laughs", f"lau{letter}ghs") == {"control-character": "warning"}


@pytest.mark.parametrize("mode", MODES)
def test_windows_line_ends_are_one_warning(mode):
    assert found(GOOD[mode].replace("\n", "\r\n"), mode) == {"control-character": "warning"}


# Length and style


def test_long_prompt_is_a_warning():
    filler = " The wheel turns." * 500
    assert changed(" says in a dry", filler + " He (S1) says in a dry")["long"] == "warning"


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("A fine, even ticking", "One. Two. Three. A fine, even ticking", "long-soundscape"),
        ("A solo clarinet", "One. Two! Three? A solo clarinet", "long-music"),
        ("A solo clarinet", "A nostalgic clarinet", "mood-words"),
        ("A solo clarinet at a slow tempo, joined by quiet plucked strings.", "none", "not-applicable"),
        ("with small amplitude", "with medium amplitude", "camera-amplitude"),
        ("at slow speed", "at moderate speed", "camera-speed"),
        ("The camera pushes in", "The camera slowly pushes in", "camera-speed"),
        ("The camera pushes in", "The camera pushes in quickly", "camera-speed"),
    ],
)
def test_style_is_a_warning(old, new, code):
    assert changed(old, new) == {code: "warning"}


def test_speed_of_other_things_is_free():
    assert changed("he lowers a tiny gear", "a car passes. He works at great speed and lowers a gear") == {}


def test_description_in_another_language_is_a_warning():
    rain = "[Shot 1] 雨の夜、猫が窓辺で眠っている。"
    prompt = f"integrated_multimodal_description: {rain}\n\noverall_soundscape: 雨。\n\nnon_diegetic_music: N/A"
    assert found(prompt) == {"not-english": "warning"}


# The report


def test_tokens_are_counted_by_the_given_tokenizer():
    report = check(BODY, context(), count_tokens=lambda text: len(text.split()))
    assert report.num_tokens == len(BODY.split())
    assert f"{report.num_tokens} tokens" in report.headline()
    assert check(BODY, context(), count_tokens=lambda text: 262_145).errors[0].code == "too-many-tokens"


def test_findings_name_their_line():
    (finding,) = check(REFERENCE.replace("fully_preserved", "kept"), context("ref2va")).findings
    assert (
        finding.line
        == REFERENCE.splitlines().index(
            "<Subject 1> (appears in [Shot 1], [Shot 2]): fully_preserved - face, glasses and apron are kept."
        )
        + 1
    )


def test_codes_are_plain_and_messages_one_line():
    prompts = [REFERENCE.replace(" ", "\u00a0"), "x\n" + BODY.replace("d", "D"), "```\n<Image 1>\n\ud800<|im_end|>\x00"]
    for prompt in prompts:
        for mode in MODES:
            for finding in check(prompt, context(mode)).findings:
                assert finding.code.replace("-", "").isalpha()
                assert finding.code.isascii()
                assert "\n" not in finding.message
                finding.message.encode()


# Anything that can be pasted


@pytest.mark.parametrize("prompt", ["", " ", "\n\r\n", "\u200b", "\x00", "\ud800 cat", "x" * 100_001, None, 3])
def test_unusable_prompt_is_an_error(prompt):
    report = check(prompt, context(), count_tokens=len)
    assert "unusable" in {finding.code for finding in report.errors}
    report.text().encode()


ODD = {
    "shots": "[Shot " * 10_000,
    "closed shots": "[Shot 1] " * 10_000,
    "dialogue": "<d>" * 30_000,
    "lines": "<d>[English] a</d>" * 5_000,
    "labels": "<Subject 1> " * 8_000,
    "brackets": "<" * 100_000,
    "quotes": '"' * 100_000,
    "typographic quotes": "\u201c" * 100_000,
    "spaces": " " * 99_000 + "x",
    "dots": "." * 99_000 + "x",
    "camera": "camera " * 14_000,
    "voiceover": "voiceover <d>[English] a</d> " * 3_000,
    "sections": "overall_soundscape:" * 5_000,
    "lines of nothing": "\r" * 99_000 + "x",
    "combining": "e\u0301" * 50_000,
    "right to left": "\u202eمرحبا " * 10_000,
    "emoji": "👩‍👩‍👧🌧" * 10_000,
}


@pytest.mark.parametrize("name", ODD)
def test_odd_prompt_is_checked_in_a_moment(name):
    """Patterns that grow with the square of the length would take minutes."""
    fields = dict.fromkeys(MEDIA, 1)
    started = time.monotonic()
    for text in (ODD[name], BODY.replace("A wide shot", ODD[name]), REFERENCE.replace("A wide shot", ODD[name])):
        for mode in ("t2va", "ref2va"):
            check(text, context(mode, **(fields if mode == "ref2va" else {}))).text().encode()
        detect_mode(text)
    assert time.monotonic() - started < 60


# The context


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mode": "i2va"}, "mode='i2va'"),
        ({"num_frames": 1}, "frames=1"),
        ({"num_frames": 125}, "17k + 5; use 141"),
        ({"requested_s": 8}, "192 frames"),
        ({"num_pictures": 1}, "choose the mode that fits"),
        ({"mode": "first", "num_pictures": 2}, "choose the mode that fits"),
        ({"mode": "last", "num_audios": 1}, "choose the mode that fits"),
        ({"mode": "ref2va", "num_videos": -1}, "not a number of media"),
    ],
)
def test_contradicting_context_is_refused(fields, words):
    with pytest.raises(RequestError) as info:
        PromptContext(**{"mode": "t2va", "num_frames": 124, **fields})
    assert words in str(info.value)


def media(*conditions, task="fl2va"):
    request = ResolvedRequest(
        width=64, height=64, num_frames=124, num_latent_frames=37, num_audio_latents=207, task=task
    )
    return EncodedMedia(request=request, media=tuple(EncodedMedium(condition=condition) for condition in conditions))


def keyframes(*places):
    return media(*(Condition(kind="keyframe", frame=place) for place in places))


@pytest.mark.parametrize(
    ("places", "mode"), [((0,), "first"), ((0, 123), "first_last"), ((123,), "last"), ((0, 51, 123), "first_last")]
)
def test_places_of_keyframes_decide_the_mode(places, mode):
    assert context_for(BODY, "auto", 124, keyframes(*places)).mode == mode


@pytest.mark.parametrize("places", [(51,), (0, 51), (0, 51, 123)])
def test_keyframes_elsewhere_have_no_first_line(places):
    given = context_for(BODY, "auto", 124, keyframes(*places))
    codes = {finding.code: finding.level for finding in check(GOOD[given.mode], given).findings}
    assert codes["first-line-unknown"] == "warning"
    assert "first-line" not in codes


@pytest.mark.parametrize(("places", "mode"), [((0,), "last"), ((123,), "first"), ((0,), "t2va"), ((0, 123), "ref2va")])
def test_mode_of_other_media_is_refused(places, mode):
    with pytest.raises(RequestError, match=f"mode={mode}, but the connected media are for"):
        context_for(BODY, mode, 124, keyframes(*places))


def test_soundtracks_are_told_from_other_sounds():
    sound = torch.zeros(2, 32, 1)
    given = media(
        Condition(kind="audio", audio=sound),
        Condition(kind="video", audio=sound),
        Condition(kind="image"),
        Condition(kind="video"),
        Condition(kind="video", audio=sound),
        task="ref2va",
    )
    found = context_for(BODY, "auto", 22, given)
    assert (found.mode, found.num_frames, found.soundtracks) == ("ref2va", 124, (2, 3))
    assert [found.attached(kind) for kind in ("Picture", "Video", "Audio")] == [1, 3, 3]


def test_word_summary_makes_no_reference_prompt():
    assert detect_mode("A cat. Summary: it sleeps.") == "t2va"


def test_length_off_the_grid_is_the_one_that_runs():
    assert context_for(BODY, "auto", 125).num_frames == 141
