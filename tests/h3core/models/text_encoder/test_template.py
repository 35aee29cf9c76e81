"""Token ids of the released tokenizer, the grammar of a presentation, and what a prompt may not contain."""

import hashlib
import json
import shutil

import pytest

from comfyui_h3.h3core.checkpoint.official import Checkpoint
from comfyui_h3.h3core.errors import CheckpointError, RequestError
from comfyui_h3.h3core.models.text_encoder.template import Presenter
from comfyui_h3.h3core.models.text_encoder.tokens import CONTROL_TOKENS
from comfyui_h3.h3core.tiny.tokenizer import SPECIAL_TOKENS

SHORT = (
    "integrated_multimodal_description: [Shot 1] Live-action, a baker (S1) says: <d>[English] First batch of the "
    "morning.</d>\n\noverall_soundscape: Rain.\n\nnon_diegetic_music: N/A"
)
RELEASED_IDS = {
    SHORT: "396 47172 26290 318 57597 11448 25 508 36402 220 16 60 11158 25059 11 264 75828 320 50 16 8 2727 25 220 "
    "151669 58 22574 60 5512 7162 315 279 6556 13 151670 271 74455 643 3095 5330 25 21911 382 6280 61588 35224 61863 "
    "25 451 10360",
    "一只猫弹钢琴 (S1) 说：<d>[Chinese] 早上好！</d>": "102292 100472 100080 108191 320 50 16 8 220 36587 5122 151669 "
    "58 44923 60 220 105083 52801 6313 151670",
    "<Picture 1>: ": "21604 3826 220 16 26818 220",
    "<Picture 2>: ": "21604 3826 220 17 26818 220",
    "<Audio 1>: ": "65406 220 16 26818 220",
    "<Video 1>: ": "27 10724 220 16 26818 220",
    "<0.2 seconds>": "27 15 13 17 6486 29",
    "<1.2 seconds>": "27 16 13 17 6486 29",
    "<d>[English] hold on</d><|cutoff|>": "151669 58 22574 60 3331 389 151670 151671",
    "<|lyrics_start|><d>[Chinese] 你好</d><|lyrics_end|>": "151672 151669 58 44923 60 220 108386 151670 151673",
    "<scenetrans>": "27 2388 268 17366 596 29",
    "<cutoff>": "63889 27440 29",
}


@pytest.fixture(scope="module")
def released(official_data):
    return Presenter.from_folder(official_data / "FL2VA" / "tokenizer", vocab_rows=151_936)


@pytest.fixture(scope="module")
def tiny(tiny_h3):
    return Checkpoint.open(tiny_h3, "fl2va").load_presenter()


@pytest.mark.parametrize("text", RELEASED_IDS)
def test_ids_are_those_of_the_release(released, text):
    assert released.present(text).ids.tolist() == [int(i) for i in RELEASED_IDS[text].split()]


LONG_PROMPTS = {  # of the request scripts that come with the release: hash, number of tokens, first and last ids
    "t2va": ("98f36b879692095e", 537, "396 47172 26290 318 57597", "1283 279 7784 13"),
    "fl2va": ("ae09dc5611671143", 919, "2461 279 2169 2766 11", "315 279 2997 22888 13"),
    "ref2va": ("11f126106c4a2b12", 801, "11501 84881 510 27 13019", "279 21355 21276 13"),
}


@pytest.mark.parametrize("task", LONG_PROMPTS)
def test_long_prompts_of_the_release_have_its_ids(official_data, released, task):
    script = official_data / "scripts" / "readme" / f"reproducible-768p-{task}-request.sh"
    if not script.is_file():
        pytest.skip(f"the request scripts of the release are not in {official_data}")
    body = script.read_text(encoding="utf-8").split("<<'JSON'\n")[1].split("\nJSON\n")[0]
    prompt = json.loads(body)["prompt"]
    digest, count, first, last = LONG_PROMPTS[task]
    assert hashlib.sha256(prompt.encode()).hexdigest().startswith(digest)
    ids = [str(i) for i in released.tokenize(prompt)]
    assert len(ids) == count
    assert " ".join(ids).startswith(first)
    assert " ".join(ids).endswith(last)


def test_released_vocabulary_has_the_seven_extra_tokens(released):
    tokens = ["<d>", "</d>", "<|cutoff|>", "<|lyrics_start|>", "<|lyrics_end|>", "<|caption_start|>", "<|caption_end|>"]
    assert [released.tokenize(token) for token in tokens] == [[i] for i in range(151_669, 151_676)]
    assert len(released._tokenizer) == 151_676


def test_tokenizer_without_the_extra_tokens_is_refused(official_data, tmp_path):
    """A stock Qwen tokenizer splits <d> into letters: speech is then ignored, and nothing fails."""
    folder = shutil.copytree(official_data / "FL2VA" / "tokenizer", tmp_path / "tokenizer")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("additional_special_tokens")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="<d>"):
        Presenter.from_folder(folder, vocab_rows=151_936)


def test_tokenizer_with_damaged_merges_is_refused(official_data, tmp_path):
    """It would read every word letter by letter, and nothing would fail."""
    folder = shutil.copytree(official_data / "FL2VA" / "tokenizer", tmp_path / "tokenizer")
    (folder / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(CheckpointError, match="Picture 1"):
        Presenter.from_folder(folder, vocab_rows=151_936)


def test_python_code_of_a_checkpoint_is_never_run(tiny_h3, tmp_path):
    folder = shutil.copytree(tiny_h3 / "FL2VA" / "tokenizer", tmp_path / "tokenizer")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    with pytest.raises(CheckpointError, match="not a readable tokenizer"):
        Presenter.from_folder(folder, vocab_rows=512)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("file", ["vocab.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["", "[]", "garbage"])
def test_damaged_tokenizer_file_is_refused(tiny_h3, tmp_path, file, text):
    folder = shutil.copytree(tiny_h3 / "FL2VA" / "tokenizer", tmp_path / "tokenizer")
    (folder / file).write_text(text)
    with pytest.raises(CheckpointError):
        Presenter.from_folder(folder, vocab_rows=512)


def test_missing_tokenizer_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="tokenizer"):
        Presenter.from_folder(tmp_path, vocab_rows=512)


@pytest.mark.parametrize("text", [SHORT, "雨の夜 🌧", "مرحبا بالعالم", "a", " a\r\n\tb  ", "e\u0301", "\x00\x7f"])
def test_tiny_tokenizer_loses_nothing(tiny, text):
    import unicodedata

    ids = tiny.tokenize(text)
    assert tiny._tokenizer.decode(ids, clean_up_tokenization_spaces=False) == unicodedata.normalize("NFC", text)
    assert max(ids) < 512


def test_tiny_tokenizer_knows_the_extra_tokens(tiny):
    assert [tiny.tokenize(token) for token in SPECIAL_TOKENS] == [[i] for i in range(448, 469)]


def test_prompt_is_taken_verbatim(tiny):
    """No start or end token, no stripping, no truncation."""
    for text in ("a cat", " a cat ", "a cat\n", "word " * 5000):
        assert tiny.present(text).ids.tolist() == tiny.tokenize(text)
    assert len(tiny.present("word " * 5000).ids) >= 5000


def test_all_rows_of_a_text_are_text(tiny):
    assert set(tiny.present("a cat <d>[English] hi</d>").modality.tolist()) == {1}


@pytest.mark.parametrize("token", CONTROL_TOKENS)
def test_control_token_in_a_prompt_is_refused_by_name(tiny, token):
    with pytest.raises(RequestError) as info:
        tiny.present(f"a cat {token} on a mat")
    assert token in str(info.value)
