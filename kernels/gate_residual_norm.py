"""x = x + gate[index] * o, then h = rms_norm(x) * (1 + scale[index]) + shift[index]: from one branch of a DiT block to
the next, in one pass over the residual stream.

H3: S = rows of this rank (4,722 for 5 s at 1344x768 on 8 GPUs), D = 5376, M = num_timesteps * 3, bfloat16.
Rounding: as gate_residual followed by norm_modulate, bit for bit: the stream is rounded to bf16 before it is normed.
"""

import torch
from torch import Tensor

from comfyui_h3.kernels._triton import tl, triton
from comfyui_h3.kernels.dispatch import bf16_rows, row_index, use_triton
from comfyui_h3.kernels.gate_residual import gate_residual_ref
from comfyui_h3.kernels.launch import Launch, pick
from comfyui_h3.kernels.norm_modulate import norm_modulate_ref
from comfyui_h3.kernels.rounding import add_bf16, mul_bf16, to_bf16

# block: columns computed at a time; the new stream is read again from the cache once the norm of its row is known.
LAUNCH = {(9, 0): Launch(block=8192, num_warps=4), None: Launch(block=8192, num_warps=4)}


def gate_residual_norm_ref(
    x: Tensor, o: Tensor, gate: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, index: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    x = gate_residual_ref(x, o, gate, index)
    return x, norm_modulate_ref(x, weight, scale, shift, index, eps)


@triton.jit
def _gate_residual_norm_kernel(
    x_ptr, o_ptr, gate_ptr, weight_ptr, scale_ptr, shift_ptr, index_ptr,
    x_stride, o_stride, gate_stride, scale_stride, shift_stride, eps, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # row * stride may pass 2**31
    table_row = tl.load(index_ptr + row).to(tl.int64)
    x_row, o_row = x_ptr + row * x_stride, o_ptr + row * o_stride
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, D, BLOCK):
        col = start + tl.arange(0, BLOCK)  # [BLOCK]
        mask = col < D
        x = tl.load(x_row + col, mask=mask, other=0.0)
        o = tl.load(o_row + col, mask=mask, other=0.0)
        gate = tl.load(gate_ptr + table_row * gate_stride + col, mask=mask, other=0.0)
        x = add_bf16(x, mul_bf16(gate, o))  # two roundings, as eager: no fused multiply-add
        tl.store(x_row + col, x, mask=mask)
        x = x.to(tl.float32)
        squares += x * x
    rstd = tl.rsqrt(tl.div_rn(tl.sum(squares, axis=0), D * 1.0) + eps)
    tl.debug_barrier()  # what other threads of the program have stored is read now
    for start in tl.static_range(0, D, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < D
        x = tl.load(x_row + col, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + table_row * scale_stride + col, mask=mask, other=0.0)
        shift = tl.load(shift_ptr + table_row * shift_stride + col, mask=mask, other=0.0)
        h = mul_bf16(to_bf16(x * rstd * weight), add_bf16(scale, tl.full([BLOCK], 1.0, tl.bfloat16)))
        tl.store(o_row + col, add_bf16(h, shift), mask=mask)


def gate_residual_norm(
    x: Tensor, o: Tensor, gate: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, index: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x, o: (S, D); weight: (D,); gate, scale, shift: (M, D); index: (S,) int32 in [0, M) -> (x, h), (S, D) each.

    x and o are given away: the results may lie in their memory. Rows may be strided.
    """
    problem = bf16_rows(x=x, o=o, gate=gate, weight=weight, scale=scale, shift=shift) or row_index(index, x.device)
    if not use_triton("gate_residual_norm", x.device, problem):
        return gate_residual_norm_ref(x, o, gate, weight, scale, shift, index, eps)
    num_rows, dim = x.shape
    launch = pick(LAUNCH, x.device)
    with torch.cuda.device_of(x):
        _gate_residual_norm_kernel[(num_rows,)](
            x, o, gate, weight, scale, shift, index,
            x.stride(0), o.stride(0), gate.stride(0), scale.stride(0), shift.stride(0), eps,
            D=dim, BLOCK=launch.block, num_warps=launch.num_warps,
        )  # fmt: skip
    return x, o
