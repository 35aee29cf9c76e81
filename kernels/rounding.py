"""Arithmetic in bfloat16 inside a Triton kernel: rounded to nearest, ties to even, as PyTorch does on every device.

``mul_bf16`` and ``add_bf16`` take and give bfloat16 and round once, as an operation of eager PyTorch
does; ``to_bf16`` and ``round_bf16`` end a chain in float32, the first in bfloat16 and the second in float32.

A plain ``.to(tl.bfloat16).to(tl.float32)`` does not round: the compiler drops the pair of casts and may contract the
product before it with the add after it, and Triton's interpreter truncates. Each name stands for the one of two forms
that the device at hand has; a ``.to(tl.bfloat16)`` of ``round_bf16``'s result is exact everywhere.
"""

import torch

from comfyui_h3.kernels._triton import INTERPRETED, tl, triton


@triton.jit
def round_bf16_bits(x):
    """x: float32 -> float32 that bfloat16 holds exactly; infinities stay, a NaN stays a NaN. Integer arithmetic."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where(x != x, 0x7FC00000, rounded).to(tl.float32, bitcast=True)


@triton.jit
def round_bf16_ptx(x):
    """The same by the conversion of two values at a time that NVIDIA GPUs have from compute capability 8.0 on."""
    bits = tl.inline_asm_elementwise(
        """{
        .reg .b32 pair;
        cvt.rn.bf16x2.f32 pair, $3, $2;
        shl.b32 $0, pair, 16;
        and.b32 $1, pair, 0xffff0000;
        }""",
        "=r,=r,f,f",
        [x],
        dtype=tl.uint32,
        is_pure=True,
        pack=2,
    )
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _to_bits(x):
    return round_bf16_bits(x).to(tl.bfloat16)


@triton.jit
def _to_ptx(x):
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def _mul_bits(a, b):
    return round_bf16_bits(a.to(tl.float32) * b.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _add_bits(a, b):
    return round_bf16_bits(a.to(tl.float32) + b.to(tl.float32)).to(tl.bfloat16)


# The same two, two values in one instruction. A fused multiply-add with a neutral third operand rounds once, and is
# there from compute capability 8.0 on; -0.0 is neutral for sums, 0.0 is not.
@triton.jit
def _mul_ptx(a, b):
    return tl.inline_asm_elementwise(
        "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }",
        "=r,r,r",
        [a, b],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _add_ptx(a, b):
    return tl.inline_asm_elementwise(
        "{ .reg .b32 one; mov.b32 one, 0x3f803f80; fma.rn.bf16x2 $0, $1, one, $2; }",
        "=r,r,r",
        [a, b],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


_by_bits = INTERPRETED or torch.version.cuda is None
round_bf16 = round_bf16_bits if _by_bits else round_bf16_ptx
to_bf16 = _to_bits if _by_bits else _to_ptx
mul_bf16 = _mul_bits if _by_bits else _mul_ptx
add_bf16 = _add_bits if _by_bits else _add_ptx
