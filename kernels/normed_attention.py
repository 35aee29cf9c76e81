"""softmax(q k^T / sqrt(H)) v, where q and k were normed: their RMS is at most 1, so no maximum needs to be subtracted.

A product of two such heads is at most H, a logit at most sqrt(H): with H <= 64 its exponential lies between 3e-4 and
2981, which are normal numbers of float16. What a softmax usually does to stay in range falls away: the running maximum,
and scaling what is already added up by its change.

H3: the video decoder, B tiles, S = 1,797, N = 32, H = 64, float16.
Rounding: as a flash attention: products and sums in fp32, the exponentials to fp16 before they multiply v, the result
to fp16.
"""

import torch
from torch import Tensor

from comfyui_h3.kernels._triton import tl, triton
from comfyui_h3.kernels.dispatch import rows_of, use_triton
from comfyui_h3.kernels.launch import Launch, pick

MAX_HEAD_DIM = 64  # exp(sqrt(H)) must stay below 65,504, the largest float16
LOG2_E = 1.4426950408889634


# block: queries of one program, which reads KEYS keys at a time.
LAUNCH = {(9, 0): Launch(block=64, num_warps=4), None: Launch(block=64, num_warps=4)}
KEYS = 64
NUM_STAGES = 3  # loads in flight


def normed_attention_ref(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return out.transpose(1, 2)


@triton.jit
def _normed_attention_kernel(
    out_ptr, q_ptr, k_ptr, v_ptr, q_tile, q_row, q_head, k_tile, k_row, k_head, v_tile, v_row, v_head, N, to_log2,
    S: tl.constexpr, H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    # S is a constant so that the loop is known to run: with a way around it, the compiler makes each matrix product
    # wait for the one before.
    tile = (tl.program_id(1) // N).to(tl.int64)  # tile * stride may pass 2**31
    head = tl.program_id(1) % N
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    channel = tl.arange(0, H)
    q_start = q_ptr + tile * q_tile + head * q_head
    k_start = k_ptr + tile * k_tile + head * k_head + channel[:, None]
    v_start = v_ptr + tile * v_tile + head * v_head + channel[None, :]
    q = tl.load(q_start + row * q_row + channel[None, :], mask=row < S, other=0.0)
    sums = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, H], tl.float32)
    whole: tl.constexpr = S // BLOCK_N * BLOCK_N
    if whole > 0:
        key = tl.arange(0, BLOCK_N)
        k_at = k_start + key[None, :] * k_row
        v_at = v_start + key[:, None] * v_row
        for _ in tl.range(0, whole, BLOCK_N):
            weight = tl.exp2(tl.dot(q, tl.load(k_at)) * to_log2)  # [BLOCK_M, BLOCK_N]
            sums += tl.sum(weight, axis=1)
            acc = tl.dot(weight.to(tl.float16), tl.load(v_at), acc)
            k_at += BLOCK_N * k_row
            v_at += BLOCK_N * v_row
    if whole < S:
        key = whole + tl.arange(0, BLOCK_REST)
        k = tl.load(k_start + key[None, :] * k_row, mask=key[None, :] < S, other=0.0)
        v = tl.load(v_start + key[:, None] * v_row, mask=key[:, None] < S, other=0.0)
        weight = tl.where(key[None, :] < S, tl.exp2(tl.dot(q, k) * to_log2), 0.0)
        sums += tl.sum(weight, axis=1)
        acc = tl.dot(weight.to(tl.float16), v, acc)
    out = (acc / sums[:, None]).to(tl.float16)
    tl.store(out_ptr + ((tile * S + row) * N + head) * H + channel[None, :], out, mask=row < S)


def normed_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k, v: (B, S, N, H), q and k of RMS 1 at most, rows and heads may be strided -> (B, S, N, H), dense.

    The kernel runs in float16 for heads of 16, 32 or 64 channels.
    """
    if not use_triton("normed_attention", q.device, _problem(q, k, v)):
        return normed_attention_ref(q, k, v)
    num_tiles, num_rows, num_heads, head_dim = q.shape
    launch = pick(LAUNCH, q.device)
    out = torch.empty((num_tiles, num_rows, num_heads, head_dim), dtype=q.dtype, device=q.device)
    grid = (triton.cdiv(num_rows, launch.block), num_tiles * num_heads)
    with torch.cuda.device_of(q):
        _normed_attention_kernel[grid](
            out, q, k, v, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], num_heads, LOG2_E * head_dim**-0.5,
            S=num_rows, H=head_dim, BLOCK_M=launch.block, BLOCK_N=KEYS,
            BLOCK_REST=max(16, triton.next_power_of_2(num_rows % KEYS)), num_warps=launch.num_warps,
            num_stages=NUM_STAGES,
        )  # fmt: skip
    return out


def _problem(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """What keeps the tensors from the kernel, or None."""
    if problem := rows_of(torch.float16, q=q, k=k, v=v):
        return problem
    head_dim = q.shape[-1]
    if head_dim < 16 or head_dim > MAX_HEAD_DIM or head_dim & (head_dim - 1):
        return f"heads have {head_dim} channels, not 16, 32 or {MAX_HEAD_DIM}"
    if q.shape[0] * q.shape[2] > 65535:
        return f"{q.shape[0]} tiles of {q.shape[2]} heads are too many for one launch"
    return None
