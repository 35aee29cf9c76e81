"""x[s] + gate[index[s]] * o[s]: the gated residual of a DiT block.

H3: S = rows of this rank (4,722 for 5 s at 1344x768 on 8 GPUs), D = 5376, M = num_timesteps * 3, bfloat16.
Rounding: the product is rounded to bf16 before the add, as in eager PyTorch: equal to the reference bit for bit.
"""

import torch
from torch import Tensor

from comfyui_h3.kernels._triton import tl, triton
from comfyui_h3.kernels.dispatch import bf16_rows, row_index, use_triton
from comfyui_h3.kernels.launch import Launch, pick
from comfyui_h3.kernels.rounding import add_bf16, mul_bf16

LAUNCH = {(9, 0): Launch(block=2048, num_warps=4), None: Launch(block=2048, num_warps=4)}


def gate_residual_ref(x: Tensor, o: Tensor, gate: Tensor, index: Tensor) -> Tensor:
    return x + gate.index_select(0, index) * o


@triton.jit
def _gate_residual_kernel(x_ptr, o_ptr, gate_ptr, index_ptr, x_stride, o_stride, gate_stride, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # row * stride may pass 2**31
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = col < D
    gate_row = tl.load(index_ptr + row).to(tl.int64)
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0)
    o = tl.load(o_ptr + row * o_stride + col, mask=mask, other=0.0)
    gate = tl.load(gate_ptr + gate_row * gate_stride + col, mask=mask, other=0.0)
    x = add_bf16(x, mul_bf16(gate, o))  # two roundings, as eager: no fused multiply-add
    tl.store(x_ptr + row * x_stride + col, x, mask=mask)


def gate_residual(x: Tensor, o: Tensor, gate: Tensor, index: Tensor) -> Tensor:
    """x, o: (S, D); gate: (M, D); index: (S,) int32 in [0, M) -> (S, D) in x.dtype. Rows may be strided.

    x is given away: the result may lie in its memory.
    """
    problem = bf16_rows(x=x, o=o, gate=gate) or row_index(index, x.device)
    if not use_triton("gate_residual", x.device, problem):
        return gate_residual_ref(x, o, gate, index)
    num_rows, dim = x.shape
    launch = pick(LAUNCH, x.device)
    grid = (num_rows, triton.cdiv(dim, launch.block))
    with torch.cuda.device_of(x):
        _gate_residual_kernel[grid](
            x, o, gate, index, x.stride(0), o.stride(0), gate.stride(0), dim,
            BLOCK=launch.block, num_warps=launch.num_warps,
        )  # fmt: skip
    return x
