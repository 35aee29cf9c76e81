"""The sections summary and retention_analysis."""

import pytest

from comfyui_h3.tests.h3core.prompt.samples import REFERENCE, changed, found


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
