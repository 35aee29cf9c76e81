"""Lengths, cut verbs, camera words, moods and languages: warnings only."""

import pytest

from comfyui_h3.tests.h3core.prompt.samples import changed, found


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
        ("the camera cuts to a close-up", "we see a close-up", "cut-verb"),
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
