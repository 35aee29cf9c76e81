"""RMS norm of every query and key head, then the rotation of its first R channels.

With n = rms_norm(x[s, head]) and j < R / 2:
    y[j]         = n[j] * cos[s, j] - n[j + R / 2] * sin[s, j]
    y[j + R / 2] = n[j + R / 2] * cos[s, j] + n[j] * sin[s, j]
and the channels from R on pass through as n.

H3: S = rows of this rank (4,722 for 5 s at 1344x768 on 8 GPUs), N = 56, H = 128, R = 96, bfloat16; q and k are views of
one packed (S, 3 * N * H) projection, which is what attention then reads.
Rounding: the norm once, after its weight; then each product and each sum to bf16, as in eager PyTorch. Equal to the
reference but for the order in which the squares of a head are added up.
"""

import math

import torch
from torch import Tensor

from comfyui_h3.kernels._triton import tl, triton
from comfyui_h3.kernels.dispatch import bf16_rows, use_triton
from comfyui_h3.kernels.launch import Launch, pick
from comfyui_h3.kernels.rounding import add_bf16, mul_bf16, to_bf16

WIDEST_LOAD = 8  # bfloat16 values in one access of a thread

# block: heads of a row computed at a time, of q and then of k.
LAUNCH = {(9, 0): Launch(block=8, num_warps=2), None: Launch(block=8, num_warps=2)}


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
    x_row, weight_ptr, cos, sin, col, partner_col, head, N, head_stride, eps,
    H: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Turns the heads of one row where they are, HEADS at a time. All tensors [HEADS, H_BLOCK], head [HEADS, 1]."""
    weight = tl.load(weight_ptr + col, mask=col < H, other=0.0).to(tl.float32)
    partner_weight = tl.load(weight_ptr + partner_col, mask=col < H, other=0.0).to(tl.float32)
    for start in range(0, N, HEADS):
        x_head = x_row + (start + head) * head_stride
        mask = (start + head < N) & (col < H)
        x = tl.load(x_head + col, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.div_rn(tl.sum(x * x, axis=1, keep_dims=True), H * 1.0) + eps)
        out = to_bf16(x * rstd * weight)
        if HALF > 0:
            partner = tl.load(x_head + partner_col, mask=mask, other=0.0).to(tl.float32)
            partner = to_bf16(partner * rstd * partner_weight)
            tl.debug_barrier()  # other threads have read what is now written over
            out = add_bf16(mul_bf16(out, cos), mul_bf16(partner, sin))
        tl.store(x_head + col, out, mask=mask)


@triton.jit
def rotation(cos_row, sin_row, head, HALF: tl.constexpr, VEC: tl.constexpr, H_BLOCK: tl.constexpr):
    """Columns of a head, their partners, cosines and sines: y = n * cos + partner * sin.

    The sine has another sign in the first half; channels that pass have 1 and 0. All [HEADS, H_BLOCK], in bf16 the last
    two. A partner is half a rotation away: in whole vectors of VEC, which the compiler then reads as such.
    """
    col = tl.arange(0, H_BLOCK)[None, :] + 0 * head
    vec, lane = col // VEC, col % VEC
    angle_vec = tl.where(vec < HALF // VEC, vec, vec - HALF // VEC)
    partner_vec = tl.where(vec < HALF // VEC, vec + HALF // VEC, angle_vec)
    partner_col = tl.where(vec < 2 * HALF // VEC, partner_vec, vec) * VEC + lane
    turns = vec < 2 * HALF // VEC
    angle_col = angle_vec * VEC + lane
    cos = tl.load(cos_row + angle_col, mask=turns, other=1.0)
    sin = tl.load(sin_row + angle_col, mask=turns, other=0.0).to(tl.float32)
    return col, partner_col, cos, to_bf16(tl.where(vec < HALF // VEC, -sin, sin))


@triton.jit
def _qk_norm_rope_kernel(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr,
    q_row_stride, q_head_stride, k_row_stride, k_head_stride, cos_stride, sin_stride, N, eps,
    H: tl.constexpr, HALF: tl.constexpr, VEC: tl.constexpr, H_BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # row * stride may pass 2**31
    head = tl.arange(0, HEADS)[:, None]
    col, partner_col, cos, sin = rotation(
        cos_ptr + row * cos_stride, sin_ptr + row * sin_stride, head, HALF, VEC, H_BLOCK
    )  # fmt: skip
    q_row, k_row = q_ptr + row * q_row_stride, k_ptr + row * k_row_stride
    _norm_rope(q_row, q_weight_ptr, cos, sin, col, partner_col, head, N, q_head_stride, eps, H, HALF, HEADS)
    _norm_rope(k_row, k_weight_ptr, cos, sin, col, partner_col, head, N, k_head_stride, eps, H, HALF, HEADS)


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """q, k: (S, N, H), rows and heads may be strided; q_weight, k_weight: (H,); cos, sin: (S, R / 2) in q.dtype,
    R <= H even, 0 for the norm alone -> q, k (S, N, H).

    q and k are given away: the results may lie in their memory.
    """
    problem = bf16_rows(q=q, k=k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin)
    if not use_triton("qk_norm_rope", q.device, problem):
        return qk_norm_rope_ref(q, k, q_weight, k_weight, cos, sin, eps)
    num_rows, num_heads, head_dim = q.shape
    half = cos.shape[-1]
    launch = pick(LAUNCH, q.device)
    with torch.cuda.device_of(q):
        _qk_norm_rope_kernel[(num_rows,)](
            q, k, q_weight, k_weight, cos, sin,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos.stride(0), sin.stride(0), num_heads, eps,
            H=head_dim, HALF=half, VEC=math.gcd(half, head_dim, WIDEST_LOAD), H_BLOCK=triton.next_power_of_2(head_dim),
            HEADS=launch.block, num_warps=launch.num_warps,
        )  # fmt: skip
    return q, k
