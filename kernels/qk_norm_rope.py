"""RMS norm of every query and key head, then the rotation of its first R channels.

With n = rms_norm(x[s, head]) and j < R / 2:
    y[j]         = n[j] * cos[s, j] - n[j + R / 2] * sin[s, j]
    y[j + R / 2] = n[j + R / 2] * cos[s, j] + n[j] * sin[s, j]
and the channels from R on pass through as n.

H3: S = rows of this rank (4,722 for 5 s at 1344x768 on 8 GPUs), N = 56, H = 128, R = 96, bfloat16; q and k are views of
one packed (S, 3 * N * H) projection.
Rounding: the norm once, after its weight; then each product and each sum to bf16, as in eager PyTorch. Equal to the
reference but for the order in which the squares of a head are added up.
"""

import torch
from torch import Tensor

from comfyui_h3.kernels._triton import tl, triton
from comfyui_h3.kernels.dispatch import bf16_rows, use_triton
from comfyui_h3.kernels.launch import Launch, pick
from comfyui_h3.kernels.rounding import round_bf16

# block: heads of q, and as many of k, in one program.
LAUNCH = {(9, 0): Launch(block=8, num_warps=1), None: Launch(block=8, num_warps=1)}


def qk_norm_rope_ref(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return _norm_rope_ref(q, q_weight, cos, sin, eps), _norm_rope_ref(k, k_weight, cos, sin, eps)


def _norm_rope_ref(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    n = torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    half = cos.shape[-1]
    first, second, rest = n.split((half, half, n.shape[-1] - 2 * half), dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # (S, 1, R / 2): the same for every head
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


@triton.jit
def _norm_rope(
    out_ptr, x_ptr, weight_ptr, cos, sin, head, head_mask, x_stride, eps,
    H: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of heads of one row; out_ptr and x_ptr: head 0 of that row. cos, sin: [1, HALF_BLOCK]."""
    rest: tl.constexpr = H - 2 * HALF
    col = tl.arange(0, HALF_BLOCK)[None, :]
    mask = head_mask & (col < HALF)  # [heads, HALF_BLOCK]
    x_head = x_ptr + head * x_stride  # [heads, 1]
    first = tl.load(x_head + col, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_head + HALF + col, mask=mask, other=0.0).to(tl.float32)
    squares = tl.sum(first * first + second * second, axis=1)  # [heads]
    if rest > 0:
        rest_col = tl.arange(0, REST_BLOCK)[None, :]
        rest_mask = head_mask & (rest_col < rest)
        passed = tl.load(x_head + 2 * HALF + rest_col, mask=rest_mask, other=0.0).to(tl.float32)
        squares += tl.sum(passed * passed, axis=1)
    rstd = tl.rsqrt(tl.div_rn(squares, H * 1.0) + eps)[:, None]

    out_head = out_ptr + head * H
    col_mask = col < HALF
    first = round_bf16(first * rstd * tl.load(weight_ptr + col, mask=col_mask, other=0.0).to(tl.float32))
    second = round_bf16(second * rstd * tl.load(weight_ptr + HALF + col, mask=col_mask, other=0.0).to(tl.float32))
    out = round_bf16(round_bf16(first * cos) - round_bf16(second * sin))
    tl.store(out_head + col, out.to(tl.bfloat16), mask=mask)
    out = round_bf16(round_bf16(second * cos) + round_bf16(first * sin))
    tl.store(out_head + HALF + col, out.to(tl.bfloat16), mask=mask)
    if rest > 0:
        weight = tl.load(weight_ptr + 2 * HALF + rest_col, mask=rest_col < rest, other=0.0).to(tl.float32)
        out = round_bf16(passed * rstd * weight)
        tl.store(out_head + 2 * HALF + rest_col, out.to(tl.bfloat16), mask=rest_mask)


@triton.jit
def _qk_norm_rope_kernel(
    q_out_ptr, k_out_ptr, q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr,
    q_row_stride, q_head_stride, k_row_stride, k_head_stride, cos_stride, sin_stride, N, eps,
    H: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # row * stride may pass 2**31
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]  # [HEADS, 1]
    head_mask = head < N
    col = tl.arange(0, HALF_BLOCK)[None, :]
    cos = tl.load(cos_ptr + row * cos_stride + col, mask=col < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + row * sin_stride + col, mask=col < HALF, other=0.0).to(tl.float32)
    _norm_rope(
        q_out_ptr + row * N * H, q_ptr + row * q_row_stride, q_weight_ptr, cos, sin, head, head_mask,
        q_head_stride, eps, H, HALF, HALF_BLOCK, REST_BLOCK,
    )  # fmt: skip
    _norm_rope(
        k_out_ptr + row * N * H, k_ptr + row * k_row_stride, k_weight_ptr, cos, sin, head, head_mask,
        k_head_stride, eps, H, HALF, HALF_BLOCK, REST_BLOCK,
    )  # fmt: skip


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """q, k: (S, N, H), rows and heads may be strided; q_weight, k_weight: (H,); cos, sin: (S, R / 2) in q.dtype,
    R <= H even -> contiguous (S, N, H) for q and for k."""
    problem = bf16_rows(q=q, k=k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin)
    if not use_triton("qk_norm_rope", q.device, problem):
        return qk_norm_rope_ref(q, k, q_weight, k_weight, cos, sin, eps)
    num_rows, num_heads, head_dim = q.shape
    half = cos.shape[-1]
    launch = pick(LAUNCH, q.device)
    q_out = torch.empty((num_rows, num_heads, head_dim), dtype=q.dtype, device=q.device)
    k_out = torch.empty_like(q_out)
    grid = (num_rows, triton.cdiv(num_heads, launch.block))
    with torch.cuda.device_of(q):
        _qk_norm_rope_kernel[grid](
            q_out, k_out, q, k, q_weight, k_weight, cos, sin,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos.stride(0), sin.stride(0), num_heads, eps,
            H=head_dim, HALF=half, HEADS=launch.block, HALF_BLOCK=triton.next_power_of_2(half),
            REST_BLOCK=triton.next_power_of_2(max(1, head_dim - 2 * half)), num_warps=launch.num_warps,
        )  # fmt: skip
    return q_out, k_out
