"""Rounding to bfloat16 inside a Triton kernel: to nearest, ties to even, as PyTorch rounds on every device.

A plain ``.to(tl.bfloat16).to(tl.float32)`` does not round: the compiler drops the pair of casts and may contract the
product before it with the add after it, and Triton's interpreter truncates. ``round_bf16`` is the one of the two below
that the device at hand has; a ``.to(tl.bfloat16)`` of its result is exact everywhere.
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


round_bf16 = round_bf16_bits if INTERPRETED or torch.version.cuda is None else round_bf16_ptx
