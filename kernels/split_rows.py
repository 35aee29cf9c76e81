"""Rows of halves of what a convolution reads as it is, without a norm before it: a stride of two, or three channels.

H3: the input of a downsampling, (F, H, W, C) float32, from 256 x 256 x 128 to 32 x 32 x 512, and the pixels of tiles.
"""

import torch
from torch import Tensor

from comfyui_h3.kernels._triton import tl, triton
from comfyui_h3.kernels.compiled_once import jit_for_any
from comfyui_h3.kernels.dispatch import use_triton
from comfyui_h3.kernels.launch import Launch, pick
from comfyui_h3.kernels.split_half import SplitRows, SplitWeight, power_of_two, scale_exponent, split_ref, store_split

# block: elements of one program, in whole pixels.
LAUNCH = {(9, 0): Launch(block=4096, num_warps=4), None: Launch(block=4096, num_warps=4)}
READ_VALUES = 128  # columns of the pixels' rows: 81 values that a pixel of the output reads, and zeros


@jit_for_any("H", "W")
def _strided_rows_kernel(
    rows_ptr, x_ptr, bound_ptr, H, W, plane, C: tl.constexpr, PIXELS: tl.constexpr, PLANES: tl.constexpr
):
    frame = tl.program_id(1).to(tl.int64)
    row_width = W // 2 + 1
    quarter = (H // 2 + 1) * row_width
    row = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    mask = (row < 4 * quarter)[:, None]
    parity = row // quarter
    y = row % quarter // row_width * 2 + parity // 2
    x = row % row_width * 2 + parity % 2  # quarter is a multiple of row_width
    y = tl.where(y >= H, H - 2, y)  # mirrored; the last odd row and column are never read
    x = tl.where(x >= W, W - 2, x)
    channel = tl.arange(0, C)
    value = tl.load(x_ptr + ((frame * H + y) * W + x)[:, None] * C + channel[None, :], mask=mask, other=0.0)
    offset = (frame * 4 * quarter + row)[:, None] * C + channel[None, :]
    scale = power_of_two(scale_exponent(tl.load(bound_ptr)))
    store_split(rows_ptr, plane, offset, mask, value * scale, PLANES)


def strided_rows(x: Tensor, planes: int) -> SplitRows:
    """x: (F, H, W, C) fp32 contiguous, H and W even, C a power of two; the right and lower border is mirrored."""
    num_frames, height, width, channels = x.shape
    bound = torch.linalg.vector_norm(x, torch.inf)
    frame_rows = 4 * (height // 2 + 1) * (width // 2 + 1)
    if not use_triton("strided_rows", x.device, None):
        padded = torch.nn.functional.pad(x.movedim(-1, 1), (0, 2, 0, 2), mode="reflect").movedim(1, -1)
        parities = [padded[:, p // 2 :: 2, p % 2 :: 2] for p in range(4)]
        rows = split_ref(torch.stack(parities, dim=1), bound, planes).flatten(1, 4)
    else:
        rows = torch.empty((planes, num_frames * frame_rows, channels), dtype=torch.float16, device=x.device)
        launch = pick(LAUNCH, x.device)
        pixels = max(1, launch.block // channels)
        with torch.cuda.device_of(x):
            _strided_rows_kernel[(triton.cdiv(frame_rows, pixels), num_frames)](
                rows, x, bound, height, width, rows.stride(0),
                C=channels, PIXELS=pixels, PLANES=planes, num_warps=launch.num_warps,
            )  # fmt: skip
    return SplitRows(
        rows=rows, bound=bound, height=height // 2, width=width // 2, row_width=width // 2 + 1,
        frame_rows=frame_rows, taps=27,
    )  # fmt: skip


@jit_for_any("T", "H", "W")
def _pixel_rows_kernel(
    rows_ptr, x_ptr, bound_ptr, T, H, W, plane,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, PIXELS: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    frame = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    tap = column // CHANNELS
    t = (frame % T).to(tl.int32) + tap // 9 - 2
    y = tl.abs(pixel // W + tap // 3 % 3 - 1)
    x = tl.abs(pixel % W + tap % 3 - 1)
    y = tl.where(y >= H, 2 * H - 2 - y, y)
    x = tl.where(x >= W, 2 * W - 2 - x, x)
    clip = frame // T * CHANNELS + column % CHANNELS
    mask = (pixel < H * W) & (tap < 27) & (t >= 0)
    value = tl.load(x_ptr + ((clip * T + t) * H + y) * W + x, mask=mask, other=0.0)
    scale = power_of_two(scale_exponent(tl.load(bound_ptr)))
    offset = (frame * H * W + pixel) * COLUMNS + column
    store_split(rows_ptr, plane, offset, (pixel < H * W) & (column >= 0), value * scale, PLANES)


def pixel_rows(x: Tensor, planes: int) -> SplitRows:
    """x: (B, C, T, H, W) fp32 contiguous, 27 * C <= 128; H, W >= 2 -> for every pixel the values it reads, as channels.

    Their order is (tap, channel); zeros fill them up to 128. The border is mirrored, frames before the first are zero.
    """
    batch, channels, clip, height, width = x.shape
    bound = torch.linalg.vector_norm(x, torch.inf)
    if not use_triton("pixel_rows", x.device, None):
        padded = torch.nn.functional.pad(x, (1, 1, 1, 1, 0, 0), mode="reflect")
        padded = torch.nn.functional.pad(padded, (0, 0, 0, 0, 2, 0))
        windows = padded.unfold(2, 3, 1).unfold(3, 3, 1).unfold(4, 3, 1)  # (B, C, T, H, W, 3, 3, 3)
        values = windows.permute(0, 2, 3, 4, 5, 6, 7, 1).flatten(4)
        values = torch.nn.functional.pad(values, (0, READ_VALUES - values.shape[-1]))
        rows = split_ref(values, bound, planes).flatten(1, 4)
    else:
        shape = (planes, batch * clip * height * width, READ_VALUES)
        rows = torch.empty(shape, dtype=torch.float16, device=x.device)
        launch = pick(LAUNCH, x.device)
        pixels = launch.block // READ_VALUES
        with torch.cuda.device_of(x):
            _pixel_rows_kernel[(triton.cdiv(height * width, pixels), batch * clip)](
                rows, x, bound, clip, height, width, rows.stride(0),
                CHANNELS=channels, COLUMNS=READ_VALUES, PIXELS=pixels, PLANES=planes, num_warps=launch.num_warps,
            )  # fmt: skip
    return SplitRows(
        rows=rows, bound=bound, height=height, width=width, row_width=width, frame_rows=height * width, taps=1
    )


def pixel_weight(weight: Tensor, planes: int) -> SplitWeight:
    """weight (N, C, 3, 3, 3) fp32 of the convolution of ``pixel_rows``."""
    columns = weight.permute(0, 2, 3, 4, 1).flatten(1)
    return SplitWeight.of(torch.nn.functional.pad(columns, (0, READ_VALUES - columns.shape[1])), planes)
