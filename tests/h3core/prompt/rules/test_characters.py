"""Letters that look like others, control characters and tokens."""

import pytest

from comfyui_h3.h3core.models.text_encoder.tokens import CONTROL_TOKENS
from comfyui_h3.h3core.prompt import MODES
from comfyui_h3.tests.h3core.prompt.samples import GOOD, changed, found


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
