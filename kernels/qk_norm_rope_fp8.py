"""e4m3 rows of ``qk_norm_rope``: queries and keys as an FP8 attention reads them, one scale for all of q and one for k.

The scale needs no pass over the rows: a normed head of H channels is no longer than sqrt(H) * max|weight|, and turning
does not change that. scale = sqrt(H) * max|weight| / 448, so nothing is cut off; e4m3 keeps its 3 bits of mantissa down
to a 28,672th of that.

H3: S = rows of this rank (73,880 for 10 s at 1344x768 on one GPU), N = 56, H = 128, R = 96, bfloat16; q and k are views
of one packed (S, 3 * N * H) projection.
Rounding: that of ``qk_norm_rope``, then that of ``quantize_fp8``. Equal to the reference but for the order in which the
squares of a head are added up.
"""

import math

import torch
from torch import Tensor

from comfyui_h3.kernels._triton import tl, triton
from comfyui_h3.kernels.dispatch import bf16_rows, use_triton
from comfyui_h3.kernels.launch import Launch, pick
from comfyui_h3.kernels.qk_norm_rope import WIDEST_LOAD, qk_norm_rope_ref, rotation
from comfyui_h3.kernels.quantize_fp8 import (
    E4M3_MAX,
    E4M3_STEP,
    MIN_SCALE,
    QuantizedHeads,
    e4m3,
    e4m3_problem,
    row_reciprocal,
    row_scale,
)
from comfyui_h3.kernels.rounding import add_bf16, mul_bf16, to_bf16

# block: heads of a row computed at a time, of q and then of k. Tried at 73,880 rows.
LAUNCH = {(9, 0): Launch(block=4, num_warps=2), None: Launch(block=4, num_warps=2)}


def qk_norm_rope_fp8_ref(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[QuantizedHeads, QuantizedHeads]:
    q, k = qk_norm_rope_ref(q, k, q_weight, k_weight, cos, sin, eps)
    return _quantized(q, q_weight), _quantized(k, k_weight)


def _quantized(x: Tensor, weight: Tensor) -> QuantizedHeads:
    num_heads, head_dim = x.shape[1:]
    scale = (weight.float().abs().amax() * head_dim**0.5 * E4M3_STEP).clamp(min=MIN_SCALE)
    values = (x.float() * (1 / scale)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return QuantizedHeads(values=values, scales=scale.expand(num_heads).contiguous())


@triton.jit
def _norm_rope_fp8(
    values_row, scales_ptr, x_row, weight_ptr, cos, sin, col, partner_col, head, N, head_stride, eps, row,
    H: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """All heads of one row, HEADS at a time. Tensors are [HEADS, H_BLOCK], head is [HEADS, 1]."""
    weight = tl.load(weight_ptr + col, mask=col < H, other=0.0).to(tl.float32)
    partner_weight = tl.load(weight_ptr + partner_col, mask=col < H, other=0.0).to(tl.float32)
    unit = row_scale(tl.max(tl.max(tl.abs(weight), axis=1), axis=0) * (H**0.5))
    reciprocal = row_reciprocal(unit)
    for start in range(0, N, HEADS):
        x_head = x_row + (start + head) * head_stride
        mask = (start + head < N) & (col < H)
        x = tl.load(x_head + col, mask=mask, other=0.0).to(tl.float32)
        partner = tl.load(x_head + partner_col, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.div_rn(tl.sum(x * x, axis=1, keep_dims=True), H * 1.0) + eps)
        n, partner = to_bf16(x * rstd * weight), to_bf16(partner * rstd * partner_weight)
        out = add_bf16(mul_bf16(n, cos), mul_bf16(partner, sin)).to(tl.float32)
        tl.store(values_row + (start + head) * H + col, e4m3(out * reciprocal), mask=mask)
        tl.store(
            scales_ptr + start + head,
            unit + tl.zeros([HEADS, 1], tl.float32),
            mask=(start + head < N) & (row + 0 * head == 0),
        )


@triton.jit
def _qk_norm_rope_fp8_kernel(
    q_values_ptr, k_values_ptr, q_scales_ptr, k_scales_ptr, q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr,
    q_row_stride, q_head_stride, k_row_stride, k_head_stride, cos_stride, sin_stride, N, eps,
    H: tl.constexpr, HALF: tl.constexpr, VEC: tl.constexpr, H_BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # row * stride may pass 2**31
    head = tl.arange(0, HEADS)[:, None]
    col, partner_col, cos, sin = rotation(
        cos_ptr + row * cos_stride, sin_ptr + row * sin_stride, head, HALF, VEC, H_BLOCK
    )  # fmt: skip
    _norm_rope_fp8(
        q_values_ptr + row * N * H, q_scales_ptr, q_ptr + row * q_row_stride, q_weight_ptr, cos, sin, col, partner_col,
        head, N, q_head_stride, eps, row, H, HEADS,
    )  # fmt: skip
    _norm_rope_fp8(
        k_values_ptr + row * N * H, k_scales_ptr, k_ptr + row * k_row_stride, k_weight_ptr, cos, sin, col, partner_col,
        head, N, k_head_stride, eps, row, H, HEADS,
    )  # fmt: skip


def qk_norm_rope_fp8(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[QuantizedHeads, QuantizedHeads]:
    """q, k: (S, N, H), rows and heads may be strided; q_weight, k_weight: (H,); cos, sin: (S, R / 2) in q.dtype,
    R <= H even -> (S, N, H) quantised."""
    problem = bf16_rows(q=q, k=k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin) or e4m3_problem(q.device)
    if not use_triton("qk_norm_rope_fp8", q.device, problem):
        return qk_norm_rope_fp8_ref(q, k, q_weight, k_weight, cos, sin, eps)
    num_rows, num_heads, head_dim = q.shape
    half = cos.shape[-1]
    launch = pick(LAUNCH, q.device)
    q_out, k_out = QuantizedHeads.empty(q.shape, q.device), QuantizedHeads.empty(k.shape, k.device)
    with torch.cuda.device_of(q):
        _qk_norm_rope_fp8_kernel[(num_rows,)](
            q_out.values.view(torch.uint8), k_out.values.view(torch.uint8), q_out.scales, k_out.scales,
            q, k, q_weight, k_weight, cos, sin,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos.stride(0), sin.stride(0), num_heads, eps,
            H=head_dim, HALF=half, VEC=math.gcd(half, head_dim, WIDEST_LOAD), H_BLOCK=triton.next_power_of_2(head_dim),
            HEADS=launch.block, num_warps=launch.num_warps,
        )  # fmt: skip
    return q_out, k_out
