"""silu(group_norm(x)) of every frame on its own, as the rows of float16 halves that ``conv3d_pairs`` reads.

H3: x (F, H, W, C) float32 in channels-last order, F = 17 frames of a tile, from 256 x 256 x 128 to 16 x 16 x 1024; 32
groups. The border is mirrored, one pixel wide.
Statistics: the mean and the sum of squared distances from it, of blocks of pixels and then of the frame, so that no
variance is a difference of large sums. All in float32 and in one order: equal inputs give equal bits.
"""

import torch
from torch import Tensor

from comfyui_h3.kernels._triton import tl, triton
from comfyui_h3.kernels.compiled_once import jit_for_any
from comfyui_h3.kernels.conv3d_pairs import PairRows, split_pairs
from comfyui_h3.kernels.dispatch import use_triton
from comfyui_h3.kernels.launch import Launch, pick
from comfyui_h3.kernels.split_half import power_of_two, scale_exponent, store_split

# block: elements of one program, in whole pixels, or in whole pairs of them.
LAUNCH_STATISTICS = {(9, 0): Launch(block=8192, num_warps=4), None: Launch(block=8192, num_warps=4)}
LAUNCH = {(9, 0): Launch(block=2048, num_warps=4), None: Launch(block=2048, num_warps=4)}
JOINED = 64  # blocks whose statistics are read at a time


def group_norm_silu_ref(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
    """x (F, H, W, C) -> the same shape."""
    normed = torch.nn.functional.group_norm(x.movedim(-1, 1), groups, weight, bias, eps)
    return torch.nn.functional.silu(normed).movedim(1, -1)


@jit_for_any("num_pixels", "num_blocks")
def _block_statistics_kernel(
    mean_ptr, squares_ptr, x_ptr, num_pixels, num_blocks,
    C: tl.constexpr, GROUPS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """mean, squares: (F, num_blocks, GROUPS): of one block of pixels each."""
    block = tl.program_id(0)
    frame = tl.program_id(1).to(tl.int64)
    width: tl.constexpr = C // GROUPS
    pixel = block * PIXELS + tl.arange(0, PIXELS)
    present = pixel < num_pixels
    count = tl.minimum(PIXELS, num_pixels - block * PIXELS) * width
    offset = (frame * num_pixels + pixel)[:, None] * C + tl.arange(0, C)[None, :]
    x = tl.load(x_ptr + offset, mask=present[:, None], other=0.0).reshape(PIXELS, GROUPS, width)
    mean = tl.sum(tl.sum(x, axis=2), axis=0) / count  # (GROUPS,)
    distance = tl.where(present[:, None, None], x - mean[None, :, None], 0.0)
    squares = tl.sum(tl.sum(distance * distance, axis=2), axis=0)
    out = (frame * num_blocks + block) * GROUPS + tl.arange(0, GROUPS)
    tl.store(mean_ptr + out, mean)
    tl.store(squares_ptr + out, squares)


@jit_for_any("num_pixels", "num_blocks", "width", "pixels")
def _frame_statistics_kernel(
    frame_mean_ptr, frame_rstd_ptr, mean_ptr, squares_ptr, num_pixels, num_blocks, width, pixels, eps,
    GROUPS: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """frame_mean, frame_rstd: (F, GROUPS). width: channels of a group; pixels: of a block."""
    frame = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)[None, :]
    total = (num_pixels * width).to(tl.float32)
    mean = tl.zeros([GROUPS], tl.float32)
    for start in range(0, num_blocks, JOINED):
        block = start + tl.arange(0, JOINED)[:, None]
        count = tl.minimum(pixels, num_pixels - block * pixels) * width
        part = tl.load(mean_ptr + (frame * num_blocks + block) * GROUPS + group, mask=block < num_blocks, other=0.0)
        mean += tl.sum(part * (count / total), axis=0)
    squares = tl.zeros([GROUPS], tl.float32)
    for start in range(0, num_blocks, JOINED):
        block = start + tl.arange(0, JOINED)[:, None]
        count = tl.minimum(pixels, num_pixels - block * pixels) * width
        offset = (frame * num_blocks + block) * GROUPS + group
        distance = tl.load(mean_ptr + offset, mask=block < num_blocks, other=0.0) - mean[None, :]
        part = tl.load(squares_ptr + offset, mask=block < num_blocks, other=0.0)
        squares += tl.sum(tl.where(block < num_blocks, part + count * distance * distance, 0.0), axis=0)
    out = frame * GROUPS + tl.arange(0, GROUPS)
    tl.store(frame_mean_ptr + out, mean)
    tl.store(frame_rstd_ptr + out, tl.div_rn(1.0, tl.sqrt_rn(squares / total + eps)))


@triton.jit
def _mirrored(index, size):
    """The pixel behind one of a border one wide; index in [-1, size]."""
    index = tl.where(index < 0, -index, index)
    return tl.where(index >= size, 2 * size - 2 - index, index)


@triton.jit
def _normed_silu(x_ptr, frame_pixel, y, x, H, W, channel, mask, mean, scale, bias, C: tl.constexpr):
    """silu(norm) of the pixels (y, x), which may lie in the border, (PIXELS, C)."""
    pixel = frame_pixel + _mirrored(y, H) * W + _mirrored(x, W)
    value = tl.load(x_ptr + pixel[:, None] * C + channel[None, :], mask=mask, other=0.0)
    normed = (value - mean[None, :]) * scale[None, :] + bias[None, :]
    return normed / (1.0 + tl.exp(-normed))


@jit_for_any("H", "W")
def _group_norm_silu_kernel(
    rows_ptr, x_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, bound_ptr, H, W, plane,
    C: tl.constexpr, GROUPS: tl.constexpr, PAIRS: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """PAIRS pairs of pixels of one frame and its border, all channels."""
    frame = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, C)
    group = frame * GROUPS + channel // (C // GROUPS)
    mean = tl.load(mean_ptr + group)
    scale = tl.load(rstd_ptr + group) * tl.load(weight_ptr + channel)
    bias = tl.load(bias_ptr + channel)
    unit = power_of_two(scale_exponent(tl.load(bound_ptr)))
    row_width = (W + 1) // 2
    num_rows = (H + 2) * row_width
    row = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    mask = (row < num_rows)[:, None]
    y = row // row_width - 1
    x = row % row_width * 2
    start = frame * H * W
    offset = (frame * 4 * num_rows + row)[:, None] * C + channel[None, :]
    step = num_rows.to(tl.int64) * C
    d1 = _normed_silu(x_ptr, start, y, x, H, W, channel, mask, mean, scale, bias, C) * unit
    d2 = _normed_silu(x_ptr, start, y, x + 1, H, W, channel, mask, mean, scale, bias, C) * unit
    store_split(rows_ptr, plane, offset + step, mask, d1 + d2, PLANES)
    store_split(rows_ptr, plane, offset + 2 * step, mask, d2 - d1, PLANES)
    d0 = _normed_silu(x_ptr, start, y, x - 1, H, W, channel, mask, mean, scale, bias, C) * unit
    store_split(rows_ptr, plane, offset, mask, d0 - d2, PLANES)
    last = tl.minimum(x + 2, W)  # past the border of an odd width it belongs to no pixel
    d3 = _normed_silu(x_ptr, start, y, last, H, W, channel, mask, mean, scale, bias, C) * unit
    store_split(rows_ptr, plane, offset + 3 * step, mask, d1 - d3, PLANES)


def frame_statistics(x: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """x (F, H, W, C) fp32 contiguous -> mean and 1 / sqrt(variance + eps), (F, groups) each."""
    num_frames, height, width, channels = x.shape
    launch = pick(LAUNCH_STATISTICS, x.device)
    pixels = max(1, launch.block // channels)
    num_blocks = triton.cdiv(height * width, pixels)
    mean, squares = x.new_empty(2, num_frames, num_blocks, groups)
    frame_mean, frame_rstd = x.new_empty(2, num_frames, groups)
    with torch.cuda.device_of(x):
        _block_statistics_kernel[(num_blocks, num_frames)](
            mean, squares, x, height * width, num_blocks,
            C=channels, GROUPS=groups, PIXELS=pixels, num_warps=launch.num_warps,
        )  # fmt: skip
        _frame_statistics_kernel[(num_frames,)](
            frame_mean, frame_rstd, mean, squares, height * width, num_blocks, channels // groups, pixels, eps,
            GROUPS=groups, JOINED=JOINED, num_warps=4,
        )  # fmt: skip
    return frame_mean, frame_rstd


def group_norm_silu(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, planes: int) -> PairRows:
    """x: (F, H, W, C) fp32 contiguous, H, W >= 2, C a power of two and a multiple of ``groups``; weight, bias: (C,)."""
    num_frames, height, width, channels = x.shape
    # No value is further from the mean of n than sqrt(n - 1) standard deviations; the rows are sums of two.
    num_values = height * width * channels // groups
    bound = 2 * torch.add(bias.abs().amax(), weight.abs().amax(), alpha=num_values**0.5)
    if not use_triton("group_norm_silu", x.device, None):
        normed = group_norm_silu_ref(x, weight, bias, groups, eps).movedim(-1, 1)
        padded = torch.nn.functional.pad(normed, (1, 1, 1, 1), mode="reflect").movedim(1, -1)
        return split_pairs(torch.nn.functional.pad(padded, (0, 0, 0, width % 2)), bound, width, planes)
    mean, rstd = frame_statistics(x, groups, eps)
    num_rows = (height + 2) * ((width + 1) // 2)
    rows = torch.empty((planes, num_frames * 4 * num_rows, channels), dtype=torch.float16, device=x.device)
    launch = pick(LAUNCH, x.device)
    pairs = max(1, launch.block // channels)
    with torch.cuda.device_of(x):
        _group_norm_silu_kernel[(triton.cdiv(num_rows, pairs), num_frames)](
            rows, x, mean, rstd, weight, bias, bound, height, width, rows.stride(0),
            C=channels, GROUPS=groups, PAIRS=pairs, PLANES=planes, num_warps=launch.num_warps,
        )  # fmt: skip
    return PairRows(rows=rows, bound=bound, height=height, width=width)
