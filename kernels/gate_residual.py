"""out[s] = residual[s] + gate[index[s]] * x[s]: the gated residual of a DiT block.

H3: S = rows of this rank (4,722 for 5 s at 1344x768 on 8 GPUs), D = 5376, M = num_timesteps * 3, bfloat16.
Rounding: the product is rounded to bf16 before the add, as in eager PyTorch: equal to the reference bit for bit.
"""

import torch
from torch import Tensor

from comfyui_h3.kernels._triton import tl, triton
from comfyui_h3.kernels.dispatch import bf16_rows, row_index, use_triton
from comfyui_h3.kernels.launch import Launch, pick
from comfyui_h3.kernels.rounding import round_bf16

LAUNCH = {(9, 0): Launch(block=2048, num_warps=4), None: Launch(block=2048, num_warps=4)}


def gate_residual_ref(residual: Tensor, x: Tensor, gate: Tensor, index: Tensor) -> Tensor:
    return residual + gate.index_select(0, index) * x


@triton.jit
def _gate_residual_kernel(
    out_ptr, residual_ptr, x_ptr, gate_ptr, index_ptr, residual_stride, x_stride, gate_stride, D, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)  # row * stride may pass 2**31
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = col < D
    gate_row = tl.load(index_ptr + row).to(tl.int64)
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + gate_row * gate_stride + col, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row * residual_stride + col, mask=mask, other=0.0).to(tl.float32)
    out = round_bf16(residual + round_bf16(gate * x))  # two roundings, as eager: no fused multiply-add
    tl.store(out_ptr + row * D + col, out.to(tl.bfloat16), mask=mask)


def gate_residual(residual: Tensor, x: Tensor, gate: Tensor, index: Tensor) -> Tensor:
    """residual, x: (S, D); gate: (M, D); index: (S,) int32 in [0, M) -> (S, D) in x.dtype. Rows may be strided."""
    problem = bf16_rows(residual=residual, x=x, gate=gate) or row_index(index, x.device)
    if not use_triton("gate_residual", x.device, problem):
        return gate_residual_ref(residual, x, gate, index)
    num_rows, dim = x.shape
    launch = pick(LAUNCH, x.device)
    out = torch.empty((num_rows, dim), dtype=x.dtype, device=x.device)
    grid = (num_rows, triton.cdiv(dim, launch.block))
    with torch.cuda.device_of(x):
        _gate_residual_kernel[grid](
            out, residual, x, gate, index, residual.stride(0), x.stride(0), gate.stride(0), dim,
            BLOCK=launch.block, num_warps=launch.num_warps,
        )  # fmt: skip
    return out
