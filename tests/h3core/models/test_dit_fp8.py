"""The DiT with linears in 8 bits: rows come quantised where the device multiplies them, and are the same rows."""

import pytest
import torch
from torch import nn

from comfyui_h3.h3core.accel.fp8_attention import Fp8Attention
from comfyui_h3.h3core.checkpoint.loader import build, materialize
from comfyui_h3.h3core.models.dit.adaln import BlockModulation
from comfyui_h3.h3core.models.dit.attention import sdpa
from comfyui_h3.h3core.models.dit.block import Block
from comfyui_h3.h3core.models.dit.config import DiTConfig
from comfyui_h3.h3core.models.dit.model import DiT
from comfyui_h3.h3core.models.fp8_linear import Fp8Linear
from comfyui_h3.kernels.quantize_fp8 import QuantizedRows, quantize_fp8

CONFIG = DiTConfig(
    hidden_size=64, num_layers=2, num_attention_heads=4, attention_head_dim=32, ffn_hidden_size=96,
    text_dim=128, time_embed_hidden_size=64, time_embed_dim=48, rope_inv_freq_len=4,
)  # fmt: skip
NUM_ROWS = 70


class ReadsQuantized(Fp8Linear):
    """As on a GPU with e4m3: it asks for quantised rows, and notes what it gets."""

    multiplies_fp8 = True

    def forward(self, x):
        assert isinstance(x, QuantizedRows) == (self.name != "out_proj")
        self.rows = x if isinstance(x, QuantizedRows) else quantize_fp8(x)
        return super().forward(x)


class QuantizesItself(Fp8Linear):
    """Takes bfloat16 rows, and quantises them."""

    multiplies_fp8 = False

    def forward(self, x):
        self.rows = quantize_fp8(x)
        return super().forward(self.rows)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def random_value(generator):
    def value(name, like):
        noise = torch.randn(like.shape, generator=generator)
        return (1 + 0.2 * noise if like.ndim == 1 else noise / like.shape[-1] ** 0.5).to(like.dtype)

    return value


def make_block(generator, attend=sdpa):
    return materialize(build(lambda: Block(CONFIG, attend), torch.bfloat16), random_value(generator))


def with_linears(block, kind):
    """The block with its linears of another kind, over the same weights."""
    for name, linear in list(block.named_modules()):
        if isinstance(linear, nn.Linear | Fp8Linear):
            owner, _, leaf = name.rpartition(".")
            fp8 = kind(linear.in_features, linear.out_features, bias=False)
            fp8.name = leaf
            fp8.quantize(linear.weight)
            setattr(block.get_submodule(owner), leaf, fp8)
    return block


def make_inputs(generator):
    """Stream, table, index, cos and sin."""
    tables = (0.3 * torch.randn(6, 6, 64, generator=generator)).bfloat16().unbind(1)
    names = ("shift1", "scale1", "gate1", "shift2", "scale2", "gate2")
    table = BlockModulation(**dict(zip(names, tables, strict=True)))
    angle = torch.randn(NUM_ROWS, 12, generator=generator)
    index = torch.randint(6, (NUM_ROWS,), generator=generator, dtype=torch.int32)
    x = torch.randn(NUM_ROWS, 64, generator=generator).bfloat16()
    return x, table, index, angle.cos().bfloat16(), angle.sin().bfloat16()


def run(block, x, table, index, cos, sin):
    """The stream, and the rows for the block that follows, which is the same again."""
    entry = block.entry(table)
    x, h = block(x.clone(), entry.of(x, index, 1e-5), table, entry, index, cos, sin)
    return x, h


def test_rows_that_come_quantised_are_those_the_linear_would_make(generator):
    block, inputs = make_block(generator), make_inputs(generator)
    with torch.no_grad():
        expected, rows = run(with_linears(block, QuantizesItself), *inputs)
        kept = {name: m.rows for name, m in block.named_modules() if isinstance(m, Fp8Linear)}
        block = make_block(torch.Generator().manual_seed(0))
        out, quantized = run(with_linears(block, ReadsQuantized), *inputs)
    assert torch.equal(out, expected)
    assert isinstance(rows, torch.Tensor)
    assert isinstance(quantized, QuantizedRows)
    assert torch.equal(quantized.dequantize(), quantize_fp8(rows).dequantize())
    assert len(kept) == 4
    for name, ours in kept.items():
        assert torch.equal(block.get_submodule(name).rows.dequantize(), ours.dequantize())


@pytest.mark.parametrize("kind", [Fp8Linear, ReadsQuantized])
def test_block_is_near_bfloat16(kind, generator):
    inputs = make_inputs(generator)
    with torch.no_grad():
        expected, _ = run(make_block(torch.Generator().manual_seed(1)), *inputs)
        out, _ = run(with_linears(make_block(torch.Generator().manual_seed(1)), kind), *inputs)
    moved = (expected - inputs[0]).float()
    error = float((out.float() - expected.float()).norm() / moved.norm())
    assert 0.005 < error < 0.08  # three products in a row, each 2.6 % off by its weight, and as much by its rows


def flash_like(q, k, v, q_descale=None, k_descale=None, v_descale=None):
    """What FlashAttention 3 computes, of operands in 8 bits or in bfloat16; (1, S, N, H)."""
    operands = []
    for x, scale in ((q, q_descale), (k, k_descale), (v, v_descale)):
        assert (x.dtype == torch.float8_e4m3fn) == (scale is not None)
        assert scale is None or scale.shape == (1, x.shape[2])
        operands.append(x[0].float() * (1.0 if scale is None else scale[0][:, None]))
    return sdpa(*operands).bfloat16()[None]


def test_attention_in_8_bits_is_near_bfloat16(generator):
    inputs = make_inputs(generator)
    attend = Fp8Attention(flash=flash_like)
    with torch.no_grad():
        expected, _ = run(make_block(torch.Generator().manual_seed(1)), *inputs)
        out, _ = run(make_block(torch.Generator().manual_seed(1), attend), *inputs)
    error = float((out.float() - expected.float()).norm() / (expected - inputs[0]).float().norm())
    assert 0.002 < error < 0.05


def test_attention_in_8_bits_keeps_what_all_values_share(generator):
    """A mean of a hundred times the spread: it goes around the attention."""
    q, k = torch.randn(2, 50, 2, 32, generator=generator).bfloat16()
    v = (100 + torch.randn(50, 2, 32, generator=generator)).bfloat16()
    weight, none = torch.ones(32).bfloat16(), torch.empty(50, 0).bfloat16()
    attend = Fp8Attention(flash=flash_like)
    out = attend(*attend.norm_rope(q.clone(), k.clone(), weight, weight, none, none, 1e-5), v)
    expected = sdpa(*(torch.nn.functional.rms_norm(x.float(), (32,), eps=1e-5) for x in (q, k)), v.float())
    # In 8 bits 100 itself would be off by up to 6; one step of bfloat16 at 100 is half.
    assert (out.float() - expected).abs().max() < 0.75


def test_attention_over_bfloat16_heads_stays_bfloat16(generator):
    q, k, v = torch.randn(3, 20, 2, 32, generator=generator).bfloat16()
    assert torch.equal(Fp8Attention(flash=flash_like)(q, k, v), sdpa(q.float(), k.float(), v.float()).bfloat16())


def test_which_linears_are_in_8_bits():
    dit = build(lambda: DiT(CONFIG), torch.float8_e4m3fn)
    names = {name for name, module in dit.named_modules() if isinstance(module, Fp8Linear)}
    of_a_block = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")
    blocks = ("blocks.0", "blocks.1", "token_refiner.blocks.0", "token_refiner.blocks.1")
    assert names == {"condition_proj"} | {f"{block}.{linear}" for block in blocks for linear in of_a_block}
    assert dit.dtype == torch.bfloat16
    assert dit.video_patch_proj.weight.dtype == torch.float32
    assert dit.blocks[0].norm1.weight.dtype == torch.bfloat16
