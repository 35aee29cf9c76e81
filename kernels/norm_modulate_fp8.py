"""e4m3 rows of rms_norm(x[s]) * (1 + scale[index[s]]) + shift[index[s]]: the modulated norm, as an FP8 linear reads it.

H3: S = rows of this rank (73,880 for 10 s at 1344x768 on one GPU), D = 5376, M = num_timesteps * 3, bfloat16.
Rounding: that of ``norm_modulate``, then that of ``quantize_fp8``. Equal to the two references in a row but for the
order in which the squares of a row are added up.
"""

import torch
from torch import Tensor

from comfyui_h3.kernels._triton import tl, triton
from comfyui_h3.kernels.dispatch import bf16_rows, row_index, use_triton
from comfyui_h3.kernels.launch import Launch, pick
from comfyui_h3.kernels.norm_modulate import norm_modulate_ref
from comfyui_h3.kernels.quantize_fp8 import (
    QuantizedRows,
    e4m3,
    e4m3_problem,
    quantize_fp8_ref,
    row_reciprocal,
    row_scale,
)
from comfyui_h3.kernels.rounding import add_bf16, mul_bf16, to_bf16

# block: columns computed at a time; a row is held in registers until its scale is known. Tried at 73,880 rows.
LAUNCH = {(9, 0): Launch(block=1024, num_warps=4), None: Launch(block=1024, num_warps=4)}


def norm_modulate_fp8_ref(
    x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, index: Tensor, eps: float
) -> QuantizedRows:
    return quantize_fp8_ref(norm_modulate_ref(x, weight, scale, shift, index, eps))


@triton.jit
def normed_row_fp8(
    values_row, scales_ptr, blocks, squares, weight_ptr, scale_row, shift_row, eps,
    D: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norms, modulates and quantises a row of the stream. blocks: its NUM_BLOCKS parts, bf16 [BLOCK]; squares: their
    squares, added up block by block."""
    rstd = tl.rsqrt(tl.div_rn(tl.sum(squares, axis=0), D * 1.0) + eps)
    largest = tl.zeros([BLOCK], tl.float32)
    outs = ()
    for block in tl.static_range(NUM_BLOCKS):
        col = block * BLOCK + tl.arange(0, BLOCK)
        mask = col < D
        weight = tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(scale_row + col, mask=mask, other=0.0)
        shift = tl.load(shift_row + col, mask=mask, other=0.0)
        h = to_bf16(blocks[block].to(tl.float32) * rstd * weight)
        out = add_bf16(mul_bf16(h, add_bf16(scale, tl.full([BLOCK], 1.0, tl.bfloat16))), shift)
        largest = tl.maximum(largest, tl.abs(out.to(tl.float32)))
        outs = outs + (out,)  # type: ignore[assignment]  # noqa: RUF005
    unit = row_scale(tl.max(largest, axis=0))
    reciprocal = row_reciprocal(unit)
    for block in tl.static_range(NUM_BLOCKS):
        col = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(values_row + col, e4m3(outs[block].to(tl.float32) * reciprocal), mask=col < D)
    tl.store(scales_ptr, unit)


@triton.jit
def _norm_modulate_fp8_kernel(
    values_ptr, scales_ptr, x_ptr, weight_ptr, scale_ptr, shift_ptr, index_ptr, x_stride, scale_stride, shift_stride,
    eps, D: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # row * stride may pass 2**31
    table_row = tl.load(index_ptr + row).to(tl.int64)
    squares = tl.zeros([BLOCK], tl.float32)
    blocks = ()
    for block in tl.static_range(NUM_BLOCKS):
        col = block * BLOCK + tl.arange(0, BLOCK)
        part = tl.load(x_ptr + row * x_stride + col, mask=col < D, other=0.0)
        x = part.to(tl.float32)
        squares += x * x
        blocks = blocks + (part,)  # type: ignore[assignment]  # noqa: RUF005
    normed_row_fp8(
        values_ptr + row * D, scales_ptr + row, blocks, squares, weight_ptr,
        scale_ptr + table_row * scale_stride, shift_ptr + table_row * shift_stride, eps, D, NUM_BLOCKS, BLOCK,
    )  # fmt: skip


def norm_modulate_fp8(
    x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, index: Tensor, eps: float
) -> QuantizedRows:
    """x: (S, D); weight: (D,); scale, shift: (M, D); index: (S,) int32 in [0, M) -> (S, D) quantised.

    Rows may be strided, as those of the chunks of one (M, 6 * D) modulation table are.
    """
    problem = bf16_rows(x=x, weight=weight, scale=scale, shift=shift) or row_index(index, x.device)
    problem = problem or e4m3_problem(x.device)
    if not use_triton("norm_modulate_fp8", x.device, problem):
        return norm_modulate_fp8_ref(x, weight, scale, shift, index, eps)
    num_rows, dim = x.shape
    launch = pick(LAUNCH, x.device)
    out = QuantizedRows.empty(x.shape, x.device)
    with torch.cuda.device_of(x):
        _norm_modulate_fp8_kernel[(num_rows,)](
            out.values.view(torch.uint8), out.scales, x, weight, scale, shift, index,
            x.stride(0), scale.stride(0), shift.stride(0), eps,
            D=dim, NUM_BLOCKS=triton.cdiv(dim, launch.block), BLOCK=launch.block, num_warps=launch.num_warps,
        )  # fmt: skip
    return out
