"""A LoRA on the same weights in another layout: the same merged weights, bit for bit."""

import pytest
import torch

from comfyui_h3.h3core.checkpoint.official import Checkpoint
from comfyui_h3.h3core.config import ComponentSource
from comfyui_h3.h3core.tiny import write_comfyui
from comfyui_h3.h3core.tiny.write_diffusers import write_diffusers
from comfyui_h3.tests.h3core.lora.conftest import merged_weights
from comfyui_h3.tests.h3core.lora.lora_files import comfyui, diffusers, make_factors


@pytest.mark.parametrize("layout", ["diffusers", "comfyui"])
@pytest.mark.parametrize("family", [comfyui, diffusers])
def test_layout_of_the_base_changes_nothing(tiny_h3, checkpoint, base, tmp_path, layout, family):
    if layout == "diffusers":
        write_diffusers(tmp_path / "h3")
        other = Checkpoint.open(tmp_path / "h3", "fl2va")
    else:
        file = tmp_path / "transformer.safetensors"
        write_comfyui.save(write_comfyui.transformer_file(0, "fl2va"), file)
        other = Checkpoint.open(tiny_h3, "fl2va", [ComponentSource(component="transformer", path=file)])
    lora = (family(make_factors(0)).save(tmp_path / "a.safetensors"), 0.5)
    ours, theirs = merged_weights(checkpoint, lora)[0], merged_weights(other, lora)[0]
    assert all(torch.equal(ours[name], theirs[name]) for name in base)
    assert not torch.equal(ours["blocks.0.attn.qkv_proj.weight"], base["blocks.0.attn.qkv_proj.weight"])
