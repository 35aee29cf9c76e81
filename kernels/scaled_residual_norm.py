"""x[s] += y[s] * scale, then h[s] = rms_norm(x[s]) * weight: the residual of a video decoder's block and its next norm.

H3: S = rows of some tiles (1,797 each), D = 2048; x, scale and weight float32, y and h float16.
Rounding: the product and the sum each to fp32 (no fused multiply-add), the norm in fp32, its result to fp16. x is equal
to the reference bit for bit, h but for the order in which the squares of a row are added up.
"""

import torch
from torch import Tensor

from comfyui_h3.kernels._triton import tl, triton
from comfyui_h3.kernels.dispatch import rows_of, use_triton
from comfyui_h3.kernels.launch import Launch, pick

# block: rows of one program.
LAUNCH = {(9, 0): Launch(block=1, num_warps=4), None: Launch(block=1, num_warps=4)}

MAX_DIM = 8192  # a row is held in registers


def scaled_residual_norm_ref(
    x: Tensor, y: Tensor | None, scale: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    if y is not None and scale is not None:
        x += y * scale
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps).to(dtype)


@triton.jit
def _scaled_residual_norm_kernel(
    h_ptr, x_ptr, y_ptr, scale_ptr, weight_ptr, num_rows, eps,
    HAS_Y: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, BLOCK)  # [BLOCK]
    mask = col < D
    weight = tl.load(weight_ptr + col, mask=mask, other=0.0)
    if HAS_Y:
        scale = tl.load(scale_ptr + col, mask=mask, other=0.0)
    for i in tl.static_range(ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + i  # row * D may pass 2**31
        if row < num_rows:
            x = tl.load(x_ptr + row * D + col, mask=mask, other=0.0)
            if HAS_Y:
                x += tl.load(y_ptr + row * D + col, mask=mask, other=0.0).to(tl.float32) * scale
                tl.store(x_ptr + row * D + col, x, mask=mask)
            rstd = tl.rsqrt(tl.div_rn(tl.sum(x * x, axis=0), D * 1.0) + eps)
            tl.store(h_ptr + row * D + col, (x * rstd * weight).to(tl.float16), mask=mask)


def scaled_residual_norm(
    x: Tensor, y: Tensor | None, scale: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """x: (..., D) float32, overwritten with the sum; y: as x, in ``dtype``, or None: x stays; scale, weight: (D,)
    float32 -> h, as x, in ``dtype``. The kernel runs for dense tensors and float16."""
    if not use_triton("scaled_residual_norm", x.device, _problem(x, y, scale, weight, dtype)):
        return scaled_residual_norm_ref(x, y, scale, weight, eps, dtype)
    dim = x.shape[-1]
    num_rows = x.numel() // dim
    launch = pick(LAUNCH, x.device)
    h = torch.empty(x.shape, dtype=dtype, device=x.device)
    with torch.cuda.device_of(x):
        # Without contraction a rounded product stays one.
        _scaled_residual_norm_kernel[(triton.cdiv(num_rows, launch.block),)](
            h, x, x if y is None else y, weight if scale is None else scale, weight, num_rows, eps,
            HAS_Y=y is not None, D=dim, BLOCK=triton.next_power_of_2(dim), ROWS=launch.block,
            num_warps=launch.num_warps, enable_fp_fusion=False,
        )  # fmt: skip
    return h


def _problem(x: Tensor, y: Tensor | None, scale: Tensor | None, weight: Tensor, dtype: torch.dtype) -> str | None:
    """What keeps the tensors from the kernel, or None."""
    given = {} if scale is None else {"scale": scale}
    if problem := rows_of(torch.float32, x=x, weight=weight, **given):
        return problem
    if dtype != torch.float16:
        return f"the norm is wanted in {str(dtype).removeprefix('torch.')}, not float16"
    if y is not None:
        if problem := rows_of(dtype, y=y):
            return problem
        if y.shape != x.shape or not y.is_contiguous():
            return "y is strided or has another shape than x"
    if not x.is_contiguous():
        return "x is strided"
    if x.shape[-1] > MAX_DIM:
        return f"a row has {x.shape[-1]} values, more than {MAX_DIM}"
    return None
