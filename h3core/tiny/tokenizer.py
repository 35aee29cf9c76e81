"""A byte-level BPE of 512 entries, learned from a few sentences of ours, in the file format of the real tokenizer."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

from comfyui_h3.h3core.models.text_encoder.tokens import CONTROL_TOKENS

FIRST_SPECIAL = 448
SPECIAL_TOKENS = (
    *CONTROL_TOKENS,
    "<d>",
    "</d>",
    "<|cutoff|>",
    "<|lyrics_start|>",
    "<|lyrics_end|>",
    "<|caption_start|>",
    "<|caption_end|>",
)

_CORPUS = """
integrated_multimodal_description: [Shot 1] Live-action, a wide shot of a quiet harbour at dawn; the camera holds still.
[Shot 2] At 00:03.200, the camera cuts to a close-up of a fisherman (S1) who says: [English] The tide is with us today.
overall_soundscape: Small waves, gulls in the distance, ropes that creak. non_diegetic_music: N/A
subject_definitions: Subject 1 is the red ball. summary: [reference generation] The target video shows the ball.
retention_analysis: Picture 1: fully_preserved. Video 1: attribute_transfer. Audio 1: reference.
detailed_description: The camera pushes in with small amplitude at slow speed while music plays and rain falls.
A blue square moves left, a green circle bounces, a yellow triangle turns slowly on a dark ground with a low tone.
"""


def byte_symbols() -> list[str]:
    """A printable character for each of the 256 bytes, in the order of their ids (the GPT-2 byte table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]


def learn_merges(num_merges: int) -> list[tuple[str, str]]:
    """Merges of the corpus, most frequent pair first, ties in alphabetical order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    of_byte = dict(zip([*printable, *(b for b in range(256) if b not in printable)], byte_symbols(), strict=True))
    words = Counter(
        tuple(of_byte[byte] for byte in word.encode())
        for word in _CORPUS.replace("\n", " ").replace(" ", "\n ").split("\n")
    )
    merges: list[tuple[str, str]] = []
    while len(merges) < num_merges:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += count
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        words = Counter({_merge(word, best): count for word, count in words.items()})
    return merges


def _merge(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    for symbol in word:
        if out and (out[-1], symbol) == pair:
            out[-1] += symbol
        else:
            out.append(symbol)
    return tuple(out)


def write_tokenizer(folder: Path) -> None:
    """Writes vocab.json, merges.txt and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    symbols = byte_symbols()
    merges = learn_merges(FIRST_SPECIAL - len(symbols))
    tokens = symbols + ["".join(pair) for pair in merges]
    tokens += [f"<|unused_{i}|>" for i in range(FIRST_SPECIAL - len(tokens))]
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(FIRST_SPECIAL + i): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for i, token in enumerate(SPECIAL_TOKENS)
        },
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 262144,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    vocabulary = {token: i for i, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
