"""x = x + gate[index] * o, then e4m3 rows of rms_norm(x) * (1 + scale[index]) + shift[index]: from one branch of a DiT
block to the next, whose first linear is FP8.

H3: S = rows of this rank (73,880 for 10 s at 1344x768 on one GPU), D = 5376, M = num_timesteps * 3, bfloat16.
Rounding: that of ``gate_residual_norm``, then that of ``quantize_fp8``. The stream is equal to the reference bit for
bit, the rows but for the order in which the squares of a row are added up.
"""

import torch
from torch import Tensor

from comfyui_h3.kernels._triton import tl, triton
from comfyui_h3.kernels.dispatch import bf16_rows, row_index, use_triton
from comfyui_h3.kernels.gate_residual import gate_residual_ref
from comfyui_h3.kernels.launch import Launch, pick
from comfyui_h3.kernels.norm_modulate_fp8 import norm_modulate_fp8_ref, normed_row_fp8
from comfyui_h3.kernels.quantize_fp8 import QuantizedRows, e4m3_problem
from comfyui_h3.kernels.rounding import add_bf16, mul_bf16

# block: columns computed at a time; a row is held in registers until its scale is known. Tried at 73,880 rows.
LAUNCH = {(9, 0): Launch(block=2048, num_warps=8), None: Launch(block=2048, num_warps=8)}


def gate_residual_norm_fp8_ref(
    x: Tensor, o: Tensor, gate: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, index: Tensor, eps: float
) -> tuple[Tensor, QuantizedRows]:
    x = gate_residual_ref(x, o, gate, index)
    return x, norm_modulate_fp8_ref(x, weight, scale, shift, index, eps)


@triton.jit
def _gate_residual_norm_fp8_kernel(
    values_ptr, scales_ptr, x_ptr, o_ptr, gate_ptr, weight_ptr, scale_ptr, shift_ptr, index_ptr,
    x_stride, o_stride, gate_stride, scale_stride, shift_stride, eps,
    D: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # row * stride may pass 2**31
    table_row = tl.load(index_ptr + row).to(tl.int64)
    squares = tl.zeros([BLOCK], tl.float32)
    blocks = ()
    for block in tl.static_range(NUM_BLOCKS):
        col = block * BLOCK + tl.arange(0, BLOCK)
        mask = col < D
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0)
        o = tl.load(o_ptr + row * o_stride + col, mask=mask, other=0.0)
        gate = tl.load(gate_ptr + table_row * gate_stride + col, mask=mask, other=0.0)
        x = add_bf16(x, mul_bf16(gate, o))  # two roundings, as eager: no fused multiply-add
        tl.store(x_ptr + row * x_stride + col, x, mask=mask)
        squares += x.to(tl.float32) * x.to(tl.float32)
        blocks = blocks + (x,)  # type: ignore[assignment]  # noqa: RUF005
    normed_row_fp8(
        values_ptr + row * D, scales_ptr + row, blocks, squares, weight_ptr,
        scale_ptr + table_row * scale_stride, shift_ptr + table_row * shift_stride, eps, D, NUM_BLOCKS, BLOCK,
    )  # fmt: skip


def gate_residual_norm_fp8(
    x: Tensor, o: Tensor, gate: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, index: Tensor, eps: float
) -> tuple[Tensor, QuantizedRows]:
    """x, o: (S, D); weight: (D,); gate, scale, shift: (M, D); index: (S,) int32 in [0, M) -> x (S, D), rows (S, D).

    x is given away: the new stream may lie in its memory. Rows may be strided.
    """
    problem = bf16_rows(x=x, o=o, gate=gate, weight=weight, scale=scale, shift=shift) or row_index(index, x.device)
    problem = problem or e4m3_problem(x.device)
    if not use_triton("gate_residual_norm_fp8", x.device, problem):
        return gate_residual_norm_fp8_ref(x, o, gate, weight, scale, shift, index, eps)
    num_rows, dim = x.shape
    launch = pick(LAUNCH, x.device)
    out = QuantizedRows.empty(x.shape, x.device)
    with torch.cuda.device_of(x):
        _gate_residual_norm_fp8_kernel[(num_rows,)](
            out.values.view(torch.uint8), out.scales, x, o, gate, weight, scale, shift, index,
            x.stride(0), o.stride(0), gate.stride(0), scale.stride(0), shift.stride(0), eps,
            D=dim, NUM_BLOCKS=triton.cdiv(dim, launch.block), BLOCK=launch.block, num_warps=launch.num_warps,
        )  # fmt: skip
    return x, out
