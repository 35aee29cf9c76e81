"""Weights in 8 bits are made when they are read: from the right rows, and without a full copy in bfloat16."""

import gc
import itertools

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from comfyui_h3.h3core.checkpoint import loader, read_ahead
from comfyui_h3.h3core.checkpoint.loader import num_bytes
from comfyui_h3.h3core.checkpoint.official import Checkpoint
from comfyui_h3.h3core.errors import CheckpointError
from comfyui_h3.h3core.models.fp8_linear import Fp8Linear
from comfyui_h3.kernels.quantize_fp8 import quantize_fp8_ref

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tiny_h3):
    return Checkpoint.open(tiny_h3, "fl2va")


@pytest.fixture(scope="module")
def in_8_bits(checkpoint):
    return checkpoint.load_dit(CPU, torch.float8_e4m3fn)


def test_linears_hold_the_quantised_weight_and_all_else_the_weight(checkpoint, in_8_bits):
    plain = checkpoint.load_dit(CPU, torch.bfloat16)
    num_fp8 = 0
    for name, module in plain.named_modules():
        ours = in_8_bits.get_submodule(name)
        if isinstance(ours, Fp8Linear):
            num_fp8 += 1
            expected = quantize_fp8_ref(module.weight)
            assert torch.equal(ours.weight_scale, expected.scales)
            assert torch.equal(ours.weight.view(torch.uint8), expected.values.view(torch.uint8))
            assert (ours.bias is None) == (module.bias is None)
            assert ours.bias is None or torch.equal(ours.bias, module.bias)
        else:
            for (key, tensor), other in zip(
                module.named_parameters(recurse=False), ours.parameters(recurse=False), strict=True
            ):
                assert torch.equal(tensor, other), f"{name}.{key}"
    assert num_fp8 == 1 + 4 * (4 + 2)  # condition_proj; four linears of 4 blocks and 2 refiner blocks


def test_scales_follow_the_rows_that_the_release_interleaves(checkpoint, in_8_bits, tiny_h3):
    """In the files rows of q, k and v take turns head by head; the scale of each channel goes with its row."""
    name = "blocks.1.attn.qkv_proj.weight"
    file = load_file(checkpoint.transformer.entries[name].file)[name].bfloat16()
    heads, head_dim = checkpoint.dit_config.num_attention_heads, checkpoint.dit_config.attention_head_dim
    third_head_values = file.unflatten(0, (heads, 3, head_dim))[2, 2]
    linear = in_8_bits.blocks[1].attn.qkv_proj
    rows = slice((2 * heads + 2) * head_dim, (2 * heads + 3) * head_dim)
    assert torch.equal(linear.weight_scale[rows], quantize_fp8_ref(third_head_values).scales)


def test_text_decoder_is_in_8_bits_and_vision_is_not(checkpoint):
    encoder = checkpoint.load_text_encoder(CPU, torch.float8_e4m3fn)
    fp8 = {name for name, module in encoder.named_modules() if isinstance(module, Fp8Linear)}
    plain = {name for name, module in encoder.named_modules() if isinstance(module, nn.Linear)}
    linears = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    assert fp8 == {f"model.language_model.layers.{i}.{linear}_proj" for i in range(5) for linear in linears}
    assert plain
    assert all(name.startswith("model.visual.") for name in plain)
    assert encoder.model.language_model.embed_tokens.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("part", ["dit", "text_encoder"])
def test_no_more_than_one_weight_is_in_bfloat16_at_a_time(checkpoint, part, monkeypatch):
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", 4096)  # as small beside the tiny weights as it is beside real ones
    monkeypatch.setattr(read_ahead, "NUM_AHEAD", 1)
    new, load = getattr(checkpoint, f"new_{part}"), getattr(checkpoint, f"load_{part}")
    tensors = new(torch.float8_e4m3fn).state_dict().values()
    shapes = {x.shape for x in tensors if x.itemsize == 1} - {x.shape for x in tensors if x.itemsize > 1}

    def plain_weights():
        """How many weights of these linears are alive in bfloat16."""
        tensors = (x for x in gc.get_objects() if issubclass(type(x), torch.Tensor))
        return sum(x.shape in shapes and not x.is_meta and x.dtype == torch.bfloat16 for x in tensors)

    def most(dtype):
        calls, counts = itertools.count(), []
        load(CPU, dtype, lambda done, total: next(calls) % 9 or counts.append(plain_weights() - before))
        return max(counts)

    before = plain_weights()
    assert most(torch.float8_e4m3fn) <= 3  # as the file has it, in the order of its rows, and the next that is begun
    assert most(torch.bfloat16) > 10  # what a full copy would be


def test_bytes_are_counted_with_scales(checkpoint, in_8_bits):
    plain = checkpoint.new_dit(torch.bfloat16)
    saved = sum(
        module.weight.numel() - 4 * module.out_features
        for module in in_8_bits.modules()
        if isinstance(module, Fp8Linear)
    )
    assert num_bytes(in_8_bits) == num_bytes(checkpoint.new_dit(torch.float8_e4m3fn)) == num_bytes(plain) - saved


def test_missing_weight_is_refused_by_its_name(checkpoint):
    module = checkpoint.new_dit(torch.float8_e4m3fn)
    entries = dict(checkpoint.transformer.entries)
    del entries["blocks.0.mlp.fc1.weight"]
    with pytest.raises(CheckpointError, match=r"lacks blocks\.0\.mlp\.fc1\.weight"):
        loader.check(module, entries, checkpoint.folder)
