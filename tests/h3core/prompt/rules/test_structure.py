"""Sections, the first line and code fences."""

import pytest

from comfyui_h3.h3core.prompt import check
from comfyui_h3.tests.h3core.prompt.samples import BODY, FIRST, FIRST_LAST, GOOD, changed, context, found


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
def test_first_line_states_the_duration_or_one_that_becomes_it(seconds):
    assert changed("5.17", seconds, "last") == {}


@pytest.mark.parametrize("seconds", ["5.20", "4.00", "8.00", "0.00", "05.17", "9" * 400 + ".00"])
def test_first_line_with_another_duration_is_an_error(seconds):
    assert changed("5.17", seconds, "last") == {"first-line-duration": "error"}


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
