"""Spoken lines: markers, languages, speakers, voices from off screen."""

import pytest

from comfyui_h3.tests.h3core.prompt.samples import changed


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
