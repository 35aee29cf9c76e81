"""out[s] = rms_norm(x[s]) * (1 + scale[index[s]]) + shift[index[s]]: the AdaLN-modulated norm of a DiT block.

H3: S = rows of this rank (4,722 for 5 s at 1344x768 on 8 GPUs), D = 5376, M = num_timesteps * 3, bfloat16.
Rounding: the norm once, after its weight; then 1 + scale, the product and the sum, each to bf16, as in eager PyTorch.
Equal to the reference but for the order in which the squares of a row are added up.
"""

import torch
from torch import Tensor

from comfyui_h3.kernels._triton import tl, triton
from comfyui_h3.kernels.dispatch import bf16_rows, row_index, use_triton
from comfyui_h3.kernels.launch import Launch, pick
from comfyui_h3.kernels.rounding import add_bf16, mul_bf16, to_bf16

# block: columns read at a time; a row is read twice, the second time from the cache.
LAUNCH = {(9, 0): Launch(block=8192, num_warps=8), None: Launch(block=8192, num_warps=8)}


def norm_modulate_ref(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, index: Tensor, eps: float) -> Tensor:
    h = torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    return h * (1 + scale).index_select(0, index) + shift.index_select(0, index)


@triton.jit
def _norm_modulate_kernel(
    out_ptr, x_ptr, weight_ptr, scale_ptr, shift_ptr, index_ptr, x_stride, scale_stride, shift_stride, eps,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # row * stride may pass 2**31
    table_row = tl.load(index_ptr + row).to(tl.int64)
    x_row = x_ptr + row * x_stride
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, D, BLOCK):
        col = start + tl.arange(0, BLOCK)  # [BLOCK]
        x = tl.load(x_row + col, mask=col < D, other=0.0).to(tl.float32)
        squares += x * x
    rstd = tl.rsqrt(tl.div_rn(tl.sum(squares, axis=0), D * 1.0) + eps)
    for start in tl.static_range(0, D, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < D
        x = tl.load(x_row + col, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + table_row * scale_stride + col, mask=mask, other=0.0)
        shift = tl.load(shift_ptr + table_row * shift_stride + col, mask=mask, other=0.0)
        h = mul_bf16(to_bf16(x * rstd * weight), add_bf16(scale, tl.full([BLOCK], 1.0, tl.bfloat16)))
        tl.store(out_ptr + row * D + col, add_bf16(h, shift), mask=mask)


def norm_modulate(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, index: Tensor, eps: float) -> Tensor:
    """x: (S, D); weight: (D,); scale, shift: (M, D); index: (S,) int32 in [0, M) -> (S, D) in x.dtype.

    Rows may be strided, as those of the chunks of one (M, 6 * D) modulation table are.
    """
    problem = bf16_rows(x=x, weight=weight, scale=scale, shift=shift) or row_index(index, x.device)
    if not use_triton("norm_modulate", x.device, problem):
        return norm_modulate_ref(x, weight, scale, shift, index, eps)
    num_rows, dim = x.shape
    launch = pick(LAUNCH, x.device)
    out = torch.empty((num_rows, dim), dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        _norm_modulate_kernel[(num_rows,)](
            out, x, weight, scale, shift, index, x.stride(0), scale.stride(0), shift.stride(0), eps,
            D=dim, BLOCK=launch.block, num_warps=launch.num_warps,
        )  # fmt: skip
    return out
