"""e4m3 values of an attention around their mean: v[s, n] = mean[n] + values[s, n] * scales[n].

mean[n] is that of v[:, n] over all rows, scales[n] = max|v[:, n] - mean[n]| / 448. The weights of an attention add up
to one, so attention over the centred values, plus the mean, is attention over v. Centred they must be: tensor cores
keep some 14 bits of a sum in 8 bits, and over tens of thousands of keys what all values share gets lost (a third of it,
in a flat attention over 37,776 keys on an H200); sums of centred values stay near zero.

H3: S = rows of the sequence (73,880 for 10 s at 1344x768), N = 56, H = 128, bfloat16; v is a view of the packed
(S, 3 * N * H) projection.
``add_mean`` brings the mean back: out[s, n] + mean[n], rounded to bf16 once.
Rounding: the mean to bf16, the difference in float32, then that of ``quantize_fp8``. Equal to the reference but for the
order in which the rows are added up; the same in every run.
"""

import torch
from torch import Tensor

from comfyui_h3.kernels._triton import tl, triton
from comfyui_h3.kernels.dispatch import bf16_rows, use_triton
from comfyui_h3.kernels.launch import Launch, pick
from comfyui_h3.kernels.quantize_fp8 import (
    E4M3_MAX,
    E4M3_STEP,
    MIN_SCALE,
    QuantizedHeads,
    e4m3,
    e4m3_problem,
    row_reciprocal,
)
from comfyui_h3.kernels.rounding import add_bf16

# block: rows of one head in one program, TILE of them at a time. Tried at 73,880 rows.
LAUNCH = {(9, 0): Launch(block=512, num_warps=8), None: Launch(block=512, num_warps=8)}
TILE = 16
# block: columns in one program.
ADD_LAUNCH = {(9, 0): Launch(block=2048, num_warps=4), None: Launch(block=2048, num_warps=4)}


def centred_heads_fp8_ref(v: Tensor) -> tuple[QuantizedHeads, Tensor]:
    v = v.float()
    mean = v.mean(0).bfloat16()
    v = v - mean.float()
    scales = _scales(v.abs().amax(0))
    values = (v * (1 / scales)[:, None]).clamp(-E4M3_MAX, E4M3_MAX)
    return QuantizedHeads(values=values.to(torch.float8_e4m3fn), scales=scales), mean


def _scales(largest: Tensor) -> Tensor:
    """largest: (N, H), of the difference from the mean -> (N,)."""
    return (largest.amax(-1) * E4M3_STEP).clamp(min=MIN_SCALE)


@triton.jit
def _statistics_kernel(
    sum_ptr, low_ptr, high_ptr, v_ptr, row_stride, head_stride, S,
    H: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sum, smallest and largest of each channel over one block of rows; (blocks, N, H) each."""
    head = tl.program_id(1)
    col = tl.arange(0, COLS)
    total = tl.zeros([TILE, COLS], tl.float32)
    low = tl.full([TILE, COLS], float("inf"), tl.float32)
    high = tl.full([TILE, COLS], float("-inf"), tl.float32)
    for start in range(0, ROWS, TILE):
        row = tl.program_id(0).to(tl.int64) * ROWS + start + tl.arange(0, TILE)[:, None]  # row * stride may pass 2**31
        mask = (row < S) & (col[None, :] < H)
        v = tl.load(v_ptr + row * row_stride + head * head_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        total += v
        low = tl.minimum(low, tl.where(mask, v, float("inf")))
        high = tl.maximum(high, tl.where(mask, v, float("-inf")))
    out = (tl.program_id(0) * tl.num_programs(1) + head) * H + col
    tl.store(sum_ptr + out, tl.sum(total, axis=0), mask=col < H)
    tl.store(low_ptr + out, tl.min(low, axis=0), mask=col < H)
    tl.store(high_ptr + out, tl.max(high, axis=0), mask=col < H)


@triton.jit
def _quantize_kernel(
    values_ptr, v_ptr, mean_ptr, scales_ptr, row_stride, head_stride, S,
    H: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    col = tl.arange(0, COLS)[None, :]
    mean = tl.load(mean_ptr + head * H + col, mask=col < H, other=0.0).to(tl.float32)
    reciprocal = row_reciprocal(tl.load(scales_ptr + head))
    for start in range(0, ROWS, TILE):
        row = tl.program_id(0).to(tl.int64) * ROWS + start + tl.arange(0, TILE)[:, None]
        mask = (row < S) & (col < H)
        v = tl.load(v_ptr + row * row_stride + head * head_stride + col, mask=mask, other=0.0).to(tl.float32)
        out = (row * tl.num_programs(1) + head) * H + col
        tl.store(values_ptr + out, e4m3((v - mean) * reciprocal), mask=mask)


def centred_heads_fp8(v: Tensor) -> tuple[QuantizedHeads, Tensor]:
    """v: (S, N, H), S > 0, rows and heads may be strided -> v - mean quantised; mean (N, H) bfloat16."""
    problem = bf16_rows(v=v) or e4m3_problem(v.device)
    if not use_triton("centred_heads_fp8", v.device, problem):
        return centred_heads_fp8_ref(v)
    num_rows, num_heads, head_dim = v.shape
    launch = pick(LAUNCH, v.device)
    grid = (triton.cdiv(num_rows, launch.block), num_heads)
    sizes = {"H": head_dim, "COLS": triton.next_power_of_2(head_dim), "ROWS": launch.block, "TILE": TILE}
    total, low, high = torch.empty(3, grid[0], num_heads, head_dim, dtype=torch.float32, device=v.device)
    values = torch.empty(v.shape, dtype=torch.uint8, device=v.device)
    with torch.cuda.device_of(v):
        _statistics_kernel[grid](
            total, low, high, v, v.stride(0), v.stride(1), num_rows, **sizes, num_warps=launch.num_warps
        )
        mean = (total.sum(0) / num_rows).bfloat16()
        # The largest difference is at one of the two ends.
        scales = _scales(torch.maximum(high.amax(0) - mean.float(), mean.float() - low.amin(0)))
        _quantize_kernel[grid](
            values, v, mean, scales, v.stride(0), v.stride(1), num_rows, **sizes, num_warps=launch.num_warps
        )
    return QuantizedHeads(values=values.view(torch.float8_e4m3fn), scales=scales), mean


@triton.jit
def _add_mean_kernel(out_ptr, mean_ptr, out_stride, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # row * stride may pass 2**31
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < D
    out = tl.load(out_ptr + row * out_stride + col, mask=mask, other=0.0)
    mean = tl.load(mean_ptr + col, mask=mask, other=0.0)
    tl.store(out_ptr + row * out_stride + col, add_bf16(out, mean), mask=mask)


def add_mean(out: Tensor, mean: Tensor) -> Tensor:
    """out: (S, N, H), heads dense; mean: (N, H), contiguous -> (S, N, H).

    out is given away: the result may lie in its memory.
    """
    rows = out.flatten(1)
    if not use_triton("add_mean", out.device, bf16_rows(out=rows, mean=mean)):
        return out + mean
    launch = pick(ADD_LAUNCH, out.device)
    with torch.cuda.device_of(out):
        _add_mean_kernel[(len(rows), triton.cdiv(rows.shape[1], launch.block))](
            rows, mean, rows.stride(0), rows.shape[1], BLOCK=launch.block, num_warps=launch.num_warps
        )
    return rows.view(out.shape)
