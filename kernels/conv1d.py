"""out = (conv(x) + bias + residual + total) / divisor: the convolutions of the vocoder, which keep the length.

H3: x (2, C, n) float32, C from 2048 to 8 while n grows from 40 to 32,000 values a second; 3, 7 or 11 taps, dilated by
up to 5; and 7 transposed ones, which multiply the length by 5 or 2. 10 s take 1.0e12 operations.
Rounding: every product is that of two float32 as three products of their upper and lower TF32 halves, which leaves out
2**-22 of it, and is added up in float32. Against float64, at 512 channels and 7 taps, the root mean square of the error
is 2.4e-7 of the result's; with cuDNN's float32 it is 1.1e-6. The order is fixed: equal inputs give equal bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from comfyui_h3.kernels._triton import tl, triton
from comfyui_h3.kernels.dispatch import float32_signal, use_triton


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What one program computes: ``rows`` of time by ``columns`` of channels, ``depth`` of the sum at a time."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


# By output channels, up to and including the key; the best of a sweep on an H200 at the shapes of 10 s.
TILES: Mapping[int, Tile] = {
    8: Tile(rows=256, columns=16, depth=32, num_warps=4, num_stages=2),
    16: Tile(rows=128, columns=16, depth=16, num_warps=4, num_stages=3),
    32: Tile(rows=128, columns=32, depth=32, num_warps=4, num_stages=3),
    2**31: Tile(rows=128, columns=64, depth=32, num_warps=4, num_stages=3),
}


def conv1d_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dilation: int,
    residual: Tensor | None,
    total: Tensor | None,
    divisor: int,
) -> Tensor:
    # PyTorch adds up in another order where the weight is strided.
    out = F.conv1d(x, weight.contiguous(), bias, padding=(weight.shape[2] - 1) * dilation // 2, dilation=dilation)
    for addend in (residual, total):
        if addend is not None:
            out = addend + out
    return out if divisor == 1 else out / divisor


@triton.jit(do_not_specialize=["n", "taps", "first", "has_bias", "has_residual", "has_total"])
def _conv1d_kernel(
    out_ptr, x_ptr, weight_ptr, bias_ptr, residual_ptr, total_ptr, n, channels, out_channels, taps, first,
    has_bias, has_residual, has_total, scale,
    FEW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """x (B, n, channels), weight (out_channels, taps, channels). first: where the first tap lies, before its row.

    FEW: channels where DEPTH does not divide them, else 0.
    """
    num_tiles = tl.cdiv(n, ROWS)
    item = (tl.program_id(0) // num_tiles).to(tl.int64)
    t = (tl.program_id(0) % num_tiles) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < out_channels
    dilation = -2 * first // (taps - 1)  # the taps are centred
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    if FEW == 0:
        x_ptr += item * n * channels
        for start in range(0, taps * channels, DEPTH):
            tap = start // channels
            row = t + first + tap * dilation
            channel = start - tap * channels + tl.arange(0, DEPTH)
            place = start + tl.arange(0, DEPTH)
            a = tl.load(
                x_ptr + row[:, None] * channels + channel[None, :], mask=((row >= 0) & (row < n))[:, None], other=0.0
            )
            b = tl.load(
                weight_ptr + column[None, :] * (taps * channels) + place[:, None], mask=there[None, :], other=0.0
            )
            acc = tl.dot(a, b, acc, input_precision="tf32x3")
    else:
        x_ptr += item * n * FEW
        for start in range(0, taps * FEW, DEPTH):
            place = start + tl.arange(0, DEPTH)
            real = place < taps * FEW
            row = t[:, None] + (first + (place // FEW) * dilation)[None, :]
            inside = (row >= 0) & (row < n) & real[None, :]
            a = tl.load(x_ptr + row * FEW + (place % FEW)[None, :], mask=inside, other=0.0)
            b = tl.load(
                weight_ptr + column[None, :] * (taps * FEW) + place[:, None],
                mask=there[None, :] & real[:, None],
                other=0.0,
            )
            acc = tl.dot(a, b, acc, input_precision="tf32x3")
    if has_bias:
        acc += tl.load(bias_ptr + column, mask=there, other=0.0)[None, :]
    offset = (item * n + t[:, None]) * out_channels + column[None, :]
    mask = (t < n)[:, None] & there[None, :]
    if has_residual:
        acc += tl.load(residual_ptr + offset, mask=mask, other=0.0)
    if has_total:
        acc += tl.load(total_ptr + offset, mask=mask, other=0.0)
    tl.store(out_ptr + offset, acc * scale, mask=mask)


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dilation: int = 1,
    *,
    residual: Tensor | None = None,
    total: Tensor | None = None,
    divisor: int = 1,
) -> Tensor:
    """x: (B, C, n); weight: (C', C, K), K odd; bias: (C',), dense; residual, total: (B, C', n) -> (B, C', n).

    The kernel's result has its channels innermost in memory, which it wants of its inputs as well: others are copied.
    """
    named = {"bias": bias, "residual": residual, "total": total}
    problem = float32_signal(x=x, weight=weight, **{name: t for name, t in named.items() if t is not None})
    if weight.shape[2] < 3:
        problem = problem or f"the weight has {weight.shape[2]} taps, and the kernel takes 3 or more"
    if not use_triton("conv1d", x.device, problem):
        return conv1d_ref(x, weight, bias, dilation, residual, total, divisor)
    first = -(weight.shape[2] - 1) * dilation // 2
    return _launch(x, weight.mT.contiguous(), bias, first, residual, total, divisor)


def conv_transpose1d_ref(x: Tensor, weight: Tensor, bias: Tensor, stride: int) -> Tensor:
    return F.conv_transpose1d(x, weight, bias, stride, (weight.shape[2] - stride) // 2)


def conv_transpose1d(x: Tensor, weight: Tensor, bias: Tensor, stride: int) -> Tensor:
    """x: (B, C, n); weight: (C, C', K), K - stride even, K <= 3 * stride; bias: (C',) -> (B, C', stride * n).

    As ``stride`` outputs in a row depend on three inputs in a row, it is a convolution of 3 taps to stride * C'.
    """
    problem = float32_signal(x=x, weight=weight, bias=bias)
    if not use_triton("conv_transpose1d", x.device, problem):
        return conv_transpose1d_ref(x, weight, bias, stride)
    num_items, _, n = x.shape
    channels, out_channels, num_taps = weight.shape
    before = stride - (num_taps - stride) // 2
    # Tap r of the third of the padded kernel that begins at 2 * stride reaches output r from the input before.
    taps = F.pad(weight, (before, 3 * stride - before - num_taps)).view(channels, out_channels, 3, stride)
    phases = taps.flip(2).permute(3, 1, 2, 0).reshape(stride * out_channels, 3, channels)
    out = _launch(x, phases, bias.repeat(stride), -1, None, None, 1)
    return out.mT.reshape(num_items, n * stride, out_channels).mT


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    first: int,
    residual: Tensor | None,
    total: Tensor | None,
    divisor: int,
) -> Tensor:
    num_items, channels, n = x.shape
    out_channels, num_taps, _ = weight.shape
    tile = next(tile for limit, tile in TILES.items() if out_channels <= limit)
    x = x.mT.contiguous()
    addends = bias, *(None if tensor is None else tensor.mT.contiguous() for tensor in (residual, total))
    out = torch.empty((num_items, n, out_channels), dtype=x.dtype, device=x.device)
    grid = (num_items * triton.cdiv(n, tile.rows), triton.cdiv(out_channels, tile.columns))
    with torch.cuda.device_of(x):
        _conv1d_kernel[grid](
            out, x, weight, *(x if tensor is None else tensor for tensor in addends),
            n, channels, out_channels, num_taps, first, *(int(tensor is not None) for tensor in addends), 1 / divisor,
            FEW=channels if channels % tile.depth else 0, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return out.mT
