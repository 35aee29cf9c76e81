"""The checker as a whole: silent on prompts that follow every rule, its report, and anything that can be pasted."""

import json
import time
from pathlib import Path

import pytest

from comfyui_h3.h3core.prompt import MODES, PromptContext, check, detect_mode
from comfyui_h3.tests.h3core.prompt.samples import BODY, GOOD, MEDIA, REFERENCE, context


@pytest.mark.parametrize("mode", MODES)
def test_good_prompt_has_no_findings(mode):
    report = check(GOOD[mode], context(mode))
    assert report.findings == ()
    assert report.text().startswith("0 errors, 0 warnings;")


def test_shipped_workflow_has_no_findings():
    graph = json.loads((Path(__file__).parents[3] / "workflows" / "api" / "t2va.json").read_text(encoding="utf-8"))
    (prompt,) = [node["inputs"]["prompt"] for node in graph.values() if node["class_type"] == "H3EncodePrompt"]
    assert not check(prompt, context()).findings


RELEASED = {  # the media of each request script of the release, and its frames
    "t2va": {"mode": "t2va", "num_frames": 243},
    "fl2va": {"mode": "first", "num_frames": 192},
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
