"""What is refused, ignored and reported as failed, and in which words."""

import re
import struct

import pytest
import torch

from comfyui_h3.h3core.errors import CheckpointError, RequestError
from comfyui_h3.h3core.lora.stack import with_loras
from comfyui_h3.tests.h3core.lora.lora_files import RANK, Lora, comfyui, make_factors, native

MODULE = "blocks.1.attn.out_proj"  # (64, 1792)


def saved(path, tensors, metadata=None):
    return Lora(tensors=tensors, metadata=metadata or {}).save(path / "a.safetensors")


def pair(module=MODULE, out=64, columns=1792, ranks=(RANK, RANK), dtype=torch.float32):
    return {
        f"{module}.lora_A.weight": torch.ones(ranks[0], columns).to(dtype),
        f"{module}.lora_B.weight": torch.ones(out, ranks[1]).to(dtype),
    }


GOOD = native(make_factors(0, {"blocks.3.mlp.fc2": (64, 96, "")})).tensors


def test_one_unknown_key_is_ignored_and_the_rest_applied(merge, tmp_path):
    path = saved(tmp_path, GOOD | {"text_model.encoder.q_proj.lora_A.weight": torch.ones(4, 8)})
    _, (report,) = merge((path, 1.0))
    assert set(report.applied) == set(GOOD)
    assert report.ignored == ("text_model.encoder.q_proj.lora_A.weight",)
    assert "2 keys applied, 1 ignored, 0 failed" in report.describe()


BAD = {
    "wrong output": (pair(out=65), r"it changes \[65, 1792\], blocks.1.attn.out_proj.weight takes \[64, 1792\]"),
    "wrong input": (pair(columns=1791), r"it changes \[64, 1791\]"),
    "two ranks": (pair(ranks=(4, 5)), "no product"),
    "rank 0": (pair(ranks=(0, 0)), "no product"),
    "not a matrix": ({**pair(), f"{MODULE}.lora_B.weight": torch.ones(64, RANK, 1, 1)}, "no product"),
    "integers": (pair(dtype=torch.int8), "not as floating point numbers"),
    "no lora_B": ({f"{MODULE}.lora_A.weight": torch.ones(4, 1792)}, "there is no lora_B"),
    "no lora_A": ({f"{MODULE}.lora_B.weight": torch.ones(64, 4)}, "there is no lora_A"),
    "alpha alone": ({f"{MODULE}.alpha": torch.tensor(1.0)}, "there is no lora_A and no lora_B"),
    "alpha of two": ({**pair(), f"{MODULE}.alpha": torch.ones(2)}, "alpha is not one number"),
    "bias that H3 has not": ({f"{MODULE}.diff_b": torch.ones(64)}, "H3 has no blocks.1.attn.out_proj.bias"),
    "diff of another shape": ({"blocks.0.norm1.diff": torch.ones(63)}, r"it changes \[63\]"),
    "unknown form": ({f"{MODULE}.reshape_weight": torch.ones(2)}, "this form of change is not known"),
    "twice": ({**pair(), f"{MODULE}.lora_A.x.weight": torch.ones(4, 1792)}, "changes the same parameter"),
    "pruned": (pair("blocks.0.adaln_proj.linear", 1152, 8), "pruned AdaLN"),
}


@pytest.mark.parametrize("case", BAD)
def test_keys_that_do_not_fit_fail_and_the_rest_is_applied(merge, base, tmp_path, case):
    tensors, reason = BAD[case]
    merged, (report,) = merge((saved(tmp_path, GOOD | tensors), 1.0))
    assert set(GOOD) <= set(report.applied)
    assert report.failed
    assert set(report.applied) | {failed.key for failed in report.failed} == set(GOOD | tensors)
    assert not torch.equal(merged["blocks.3.mlp.fc2.weight"], base["blocks.3.mlp.fc2.weight"])
    if case != "twice":
        assert torch.equal(merged[f"{MODULE}.weight"], base[f"{MODULE}.weight"])
    assert any(re.search(reason, failed.reason) for failed in report.failed)


def test_a_lora_of_another_model_is_refused(merge, tmp_path):
    path = saved(tmp_path, pair("double_blocks.0.img_attn.qkv"))
    with pytest.raises(
        RequestError, match=r"would change nothing: none of its keys \(double_blocks.* made for MiniMax"
    ):
        merge((path, 1.0))


def test_nothing_that_fits_is_refused_with_the_reason(merge, tmp_path):
    with pytest.raises(RequestError, match=r"would change nothing: none of its 2 keys .*it changes \[65, 1792\]"):
        merge((saved(tmp_path, pair(out=65)), 0.0))


def test_an_empty_file_is_refused(merge, tmp_path):
    with pytest.raises(RequestError, match="would change nothing"):
        merge((saved(tmp_path, {}), 1.0))


@pytest.mark.parametrize(
    ("tensors", "metadata", "name"),
    [
        ({**GOOD, "blocks.3.mlp.fc2.dora_scale": torch.ones(64)}, {}, r"DoRA \(blocks.3.mlp.fc2.dora_scale\)"),
        ({**GOOD, "blocks.3.mlp.fc2.lora_magnitude_vector.default.weight": torch.ones(64)}, {}, "DoRA"),
        (GOOD, {"lora_adapter_metadata": '{"use_dora": true}'}, r"DoRA \(lora_adapter_metadata\)"),
        ({"blocks.3.mlp.fc2.hada_w1_a": torch.ones(64, 2)}, {}, "LoHa"),
        ({"lora_unet_blocks_3_mlp_fc2.lokr_w1": torch.ones(2, 2)}, {}, "LoKr"),
        ({"blocks.3.mlp.fc2.oft_blocks": torch.ones(2, 2)}, {}, "OFT"),
    ],
)
def test_other_methods_are_refused_by_name(merge, tmp_path, tensors, metadata, name):
    with pytest.raises(RequestError, match=f"{name}.*use a plain LoRA"):
        merge((saved(tmp_path, tensors, metadata), 1.0))


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        (GOOD, {"format": "fastvideo-lora-v2"}),
        (GOOD, {"finetuned_model": "FastVideo/FastVideo-FastH3-4-step-Preview-v1-VSA"}),
        ({**GOOD, "transformer_blocks.0.attn.to_gate_compress.set_weight": torch.ones(2, 2)}, {}),
    ],
)
def test_fasth3_is_recognised_and_sent_to_its_own_switch(merge, tmp_path, tensors, metadata):
    with pytest.raises(RequestError, match=r"is a FastH3 adapter.*a switch of its own.*take it out"):
        merge((saved(tmp_path, tensors, metadata), 1.0))


def damaged(path, content):
    path = path / "a.safetensors"
    path.write_bytes(content)
    return path


def test_damaged_files_are_refused(merge, tmp_path):
    whole = saved(tmp_path, GOOD).read_bytes()
    huge = struct.pack("<Q", 2**40) + whole[8:]
    for content in (b"", whole[:-1], whole[:50], huge, b"\x80\x02pickle" + whole):
        with pytest.raises(CheckpointError, match=r"a\.safetensors"):
            merge((damaged(tmp_path, content), 1.0))


def test_absent_files_and_pickles_are_refused(merge, tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        merge((tmp_path / "gone.safetensors", 1.0))
    (tmp_path / "a.pt").write_bytes(b"")
    with pytest.raises(RequestError, match=r"not a \.safetensors file"):
        merge((tmp_path / "a.pt", 1.0))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(merge, tmp_path, value):
    tensors = {**GOOD, "blocks.3.mlp.fc2.lora_B.weight": torch.full((64, RANK), value)}
    with pytest.raises(CheckpointError, match=r"blocks.3.mlp.fc2.lora_B.weight has values that are not finite"):
        merge((saved(tmp_path, tensors), 1.0))


def test_alpha_that_is_no_number_is_refused(merge, tmp_path):
    with pytest.raises(CheckpointError, match=r"fc2.alpha is nan, not a number"):
        merge((saved(tmp_path, {**GOOD, "blocks.3.mlp.fc2.alpha": torch.tensor(float("nan"))}), 1.0))
    with pytest.raises(CheckpointError, match="alpha is 'eight', not a number"):
        merge((saved(tmp_path, GOOD, {"alpha": "eight"}), 1.0))


@pytest.mark.parametrize("metadata", ["{", "[]", '{"lora_alpha": "x"}'])
def test_config_that_is_none_is_refused(merge, tmp_path, metadata):
    with pytest.raises(CheckpointError, match=r"lora_adapter_metadata|lora_alpha"):
        merge((saved(tmp_path, GOOD, {"lora_adapter_metadata": metadata}), 1.0))


def test_patterns_that_are_expressions_are_refused(merge, tmp_path):
    config = '{"lora_alpha": 4, "alpha_pattern": {"(a+)+$": 1}}'
    with pytest.raises(RequestError, match="alpha_pattern"):
        merge((saved(tmp_path, GOOD, {"lora_adapter_metadata": config}), 1.0))


def test_file_that_changes_between_header_and_weights_is_refused(checkpoint, tmp_path):
    lora = comfyui(make_factors(0))
    path = lora.save(tmp_path / "a.safetensors")
    merged, _ = with_loras({"fl2va": checkpoint}, [(path, 1.0)])
    lora.tensors.popitem()
    lora.save(path)
    with pytest.raises(CheckpointError, match="was changed after it was opened"):
        merged["fl2va"].load_dit(torch.device("cpu"), torch.float32)
