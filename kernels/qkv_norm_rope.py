"""Queries and keys out of an interleaved projection: RMS norm of every head without a weight, then its rotation.

The projection of a row is q, k, v of head 0, then of head 1, ... With n = rms_norm(x[s, head]) and j < R / 2:
    y[j]         = n[j] * cos[s, j] - n[j + R / 2] * sin[s, j]
    y[j + R / 2] = n[j + R / 2] * cos[s, j] + n[j] * sin[s, j]
and the channels from R on pass through as n. v stays where it is.

H3: the video decoder, B tiles, S = 1,797, N = 32, H = 64, R = 48, float16.
Rounding: the norm in fp32, its result to fp16; then each product and each sum to fp16, as in eager PyTorch. Equal to
the reference but for the order in which the squares of a head are added up.
"""

import torch
from torch import Tensor

from comfyui_h3.kernels._triton import tl, triton
from comfyui_h3.kernels.dispatch import rows_of, use_triton
from comfyui_h3.kernels.launch import Launch, pick

# block: heads of q, and as many of k, in one program.
LAUNCH = {(9, 0): Launch(block=32, num_warps=4), None: Launch(block=32, num_warps=4)}


def qkv_norm_rope_ref(qkv: Tensor, cos: Tensor, sin: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.unbind(-2)
    return _norm_rope_ref(q, cos, sin, eps), _norm_rope_ref(k, cos, sin, eps), v


def _norm_rope_ref(x: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    n = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)
    half = cos.shape[-1]
    first, second, rest = n.split((half, half, n.shape[-1] - 2 * half), dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # (S, 1, R / 2): the same for every tile and every head
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


@triton.jit
def _qkv_norm_rope_kernel(
    out_ptr, qkv_ptr, cos_ptr, sin_ptr, S, N, part_size, eps,
    H: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # row * stride may pass 2**31
    slot = tl.arange(0, 2 * HEADS)[:, None]  # q and k of a head beside each other, as they lie in the projection
    head = tl.program_id(1) * HEADS + slot // 2
    part = slot % 2
    col = tl.arange(0, BLOCK)[None, :]
    mask = (head < N) & (col < H)  # [2 * HEADS, BLOCK]
    # The other channel of a pair; a channel that does not rotate is its own. Read again: its line is in the cache.
    paired = tl.where(col < HALF, col + HALF, tl.where(col < 2 * HALF, col - HALF, col))
    x_ptr = qkv_ptr + row * N * 3 * H + head * 3 * H + part * H
    x = tl.load(x_ptr + col, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(x_ptr + paired, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.div_rn(tl.sum(x * x, axis=1), H * 1.0) + eps)[:, None]
    x = (x * rstd).to(tl.float16).to(tl.float32)
    other = (other * rstd).to(tl.float16).to(tl.float32)

    angle = (row % S) * HALF + tl.where(col < HALF, col, col - HALF)
    rotated = col < 2 * HALF
    cos = tl.load(cos_ptr + angle, mask=rotated, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=rotated, other=0.0).to(tl.float32)
    sin = tl.where(col < HALF, -sin, sin)
    out = (x * cos).to(tl.float16).to(tl.float32) + (other * sin).to(tl.float16).to(tl.float32)
    tl.store(out_ptr + part * part_size + (row * N + head) * H + col, out.to(tl.float16), mask=mask)


def qkv_norm_rope(qkv: Tensor, cos: Tensor, sin: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """qkv: (B, S, N, 3, H); cos, sin: (S, R / 2) in its dtype, R <= H even -> q, k and v, each (B, S, N, H).

    v is a view of qkv. The kernel runs for dense tensors in float16, and gives q and k dense.
    """
    problem = rows_of(torch.float16, qkv=qkv, cos=cos, sin=sin)
    if problem is None and not (qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()):
        problem = "qkv, cos or sin is strided"
    if not use_triton("qkv_norm_rope", qkv.device, problem):
        return qkv_norm_rope_ref(qkv, cos, sin, eps)
    num_tiles, num_rows, num_heads, _, head_dim = qkv.shape
    launch = pick(LAUNCH, qkv.device)
    out = torch.empty((2, num_tiles, num_rows, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    grid = (num_tiles * num_rows, triton.cdiv(num_heads, launch.block))
    with torch.cuda.device_of(qkv):
        # Without contraction a rounded product stays one.
        _qkv_norm_rope_kernel[grid](
            out, qkv, cos, sin, num_rows, num_heads, out[0].numel(), eps,
            H=head_dim, HALF=cos.shape[-1], HEADS=launch.block, BLOCK=triton.next_power_of_2(head_dim),
            num_warps=launch.num_warps, enable_fp_fusion=False,
        )  # fmt: skip
    return out[0], out[1], qkv[..., 2, :]
