"""Shot markers and their times."""

import pytest

from comfyui_h3.tests.h3core.prompt.samples import changed, found


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
        (
            ', the camera cuts to a close-up of the moving balance wheel, static, under a sign reading "OPEN".',
            ",",
            "shot-empty",
        ),
    ],
)
def test_unusual_shots_are_warnings(old, new, code):
    assert changed(old, new)[code] == "warning"
