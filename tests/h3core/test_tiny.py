"""The tiny H3: the official layout, the same bytes from the same seed, nothing that hides a mistake."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from comfyui_h3.h3core.tiny.write import write_official

ROOT = Path(__file__).parents[2]


def digests(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def tensors_of(folder):
    found = {}
    for file in sorted(folder.rglob("*.safetensors")):
        found |= {f"{file.relative_to(folder).parts[0]}/{name}": tensor for name, tensor in load_file(file).items()}
    return found


def test_same_seed_gives_the_same_bytes(tiny_h3, tmp_path):
    write_official(tmp_path, seed=0)
    assert digests(tmp_path) == digests(tiny_h3)


def test_other_seed_gives_other_weights(tiny_h3, tmp_path):
    write_official(tmp_path, seed=1)
    ours, others = digests(tiny_h3), digests(tmp_path)
    assert ours.keys() == others.keys()
    assert all((ours[name] == others[name]) != name.endswith(".safetensors") for name in ours)


def test_no_tensor_is_a_no_op(tiny_h3):
    constant = {"audio_vae/pre_block.attn.zero_k_bias"}  # zero by its name and in the release
    for name, tensor in tensors_of(tiny_h3 / "FL2VA").items():
        if name in constant:
            continue
        assert torch.isfinite(tensor.float()).all(), name
        assert (tensor != 0).float().mean() > 0.9, name
        assert tensor.numel() == 1 or tensor.float().std() > 0, name


def test_partitions_differ_in_the_transformer_alone(tiny_h3):
    ours, others = digests(tiny_h3 / "FL2VA"), digests(tiny_h3 / "Ref2VA")
    assert ours.keys() == others.keys()
    differ = {name for name in ours if ours[name] != others[name]}
    assert {name.split("/")[0] for name in differ} == {"transformer", "model_index.json"}


def test_value_rows_tell_the_row_order_of_the_file(tiny_h3):
    """Blocks of head_dim rows: every third is larger, so a reader can see that q, k and v are interleaved."""
    weight = tensors_of(tiny_h3 / "FL2VA")["transformer/blocks.0.attn.qkv_proj.weight"].float()
    rms = weight.unflatten(0, (-1, 32)).pow(2).mean((1, 2)).sqrt().view(56, 3)
    assert (rms[:, 2] > 1.5 * rms[:, :2].amax(1)).all()


@pytest.mark.parametrize("component", ["transformer", "text_encoder", "video_vae", "video_vae/source", "audio_vae"])
def test_configs_have_the_keys_of_the_release(tiny_h3, official_data, component):
    ours = json.loads((tiny_h3 / "FL2VA" / component / "config.json").read_text())
    theirs = json.loads((official_data / "FL2VA" / component / "config.json").read_text())
    assert theirs.keys() - ours.keys() <= {"auto_map", "transformers_version"}


def test_files_are_those_of_the_release(tiny_h3, official_data):
    ours = {name for name in digests(tiny_h3 / "FL2VA") if not name.endswith(".safetensors")}
    theirs = {name for name in digests(official_data / "FL2VA") if not name.endswith(".safetensors")}
    assert theirs - ours == {"processor/chat_template.json"}


def test_command_line_writes_it(tmp_path):
    out = tmp_path / "模型 dir"
    result = subprocess.run(
        [sys.executable, ROOT / "_bootstrap.py", "h3core.tiny", "--out", out],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "MB" in result.stdout
    assert (out / "FL2VA/model_index.json").is_file()
    assert (out / "Ref2VA/transformer/model.safetensors.index.json").is_file()
