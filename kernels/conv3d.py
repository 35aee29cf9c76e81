"""The convolutions of the encoder that go no other way, of float16 halves on tensor cores, as exact as in float32.

out[f, y, x, n] = bias[n] + sum over taps and channels of x * weight: 3 x 3 x 3, causal in time and of stride 2, or
1 x 1 x 1. With x = xh + xl and w = wh + wl the sum is of xl * wh + xh * wl + xh * wh; what is left out, xl * wl, is
2**-22 of a product. Tensor cores cut off, rather than round, what they add up (on an H200 that costs 6e-6 of the
result, against 1e-7), so no sum inside them is longer than BLOCK_K channels of one tap: each is added to the whole in
registers, by rounding float32 additions. With one plane (float16 operands) the sum stays inside.

H3: the downsamplings, from 256 x 256 x 128 to 32 x 32 x 512, F = 17, 9 or 5 frames of a tile, and the first
convolution. Each output is summed in one order, whatever else is computed: equal inputs give equal bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from comfyui_h3.kernels._triton import TensorDescriptor, tl, triton
from comfyui_h3.kernels.compiled_once import jit_for_any
from comfyui_h3.kernels.dispatch import use_triton
from comfyui_h3.kernels.split_half import SplitRows, SplitWeight, join_ref, power_of_two, scale_exponent


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What one program computes, pixels x channels, and how: channels it reads at a time, warps, loads in flight."""

    pixels: int
    outputs: int
    channels: int
    num_warps: int
    num_stages: int


# Key: planes. The best of a sweep on an H200, at the sizes of the first four levels.
TILES = {
    2: Tile(pixels=128, outputs=128, channels=64, num_warps=8, num_stages=3),
    1: Tile(pixels=128, outputs=128, channels=64, num_warps=8, num_stages=4),
}


# No size is specialized on: a clip, a keyframe and all levels of the encoder run what was compiled once.
@jit_for_any(
    "frames_in", "frames_out", "frame_rows", "row_width", "H", "W", "C", "x_plane", "weight_plane", "num_blocks_m",
    "num_blocks_n",
)  # fmt: skip
def _conv3d_kernel(
    out_ptr, x_rows, weight_rows, bias_ptr, x_bound_ptr, weight_bound_ptr,
    frames_in, frames_out, frame_rows, row_width, H, W, C, N, x_plane, weight_plane, num_blocks_m, num_blocks_n,
    TAPS: tl.constexpr, TIME_STRIDE: tl.constexpr, PLANES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of one frame, some of them border and not stored, times BLOCK_N output channels."""
    program = tl.program_id(0)
    n_start = program % num_blocks_n * BLOCK_N
    m_start = program // num_blocks_n % num_blocks_m * BLOCK_M
    frame = program // (num_blocks_n * num_blocks_m)
    steps = tl.cdiv(C, BLOCK_K)
    if TAPS == 27:
        time = frame % frames_out * TIME_STRIDE - 2  # of the first tap; frames before the clip are zero
        first = tl.maximum(0, -time) * 9
        frame_row = (frame // frames_out * frames_in + time) * frame_rows + m_start
    else:
        first = 0
        frame_row = frame * frame_rows + m_start
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(first * steps, TAPS * steps):
        tap = step // steps
        channel = step % steps * BLOCK_K
        x_row = frame_row
        if TAPS == 27:
            dy = tap % 9 // 3
            dx = tap % 3
            shift = (dy % 2 * 2 + dx % 2) * (frame_rows // 4) + dy // 2 * row_width + dx // 2
            x_row += tap // 9 * frame_rows + shift
        weight_row = tap * N + n_start
        x_high = x_rows.load([x_row, channel])
        weight_high = weight_rows.load([weight_row, channel]).T
        if PLANES == 2:
            x_low = x_rows.load([x_plane + x_row, channel])
            weight_low = weight_rows.load([weight_plane + weight_row, channel]).T
            part = tl.dot(x_low, weight_high)
            part = tl.dot(x_high, weight_low, part)
            part = tl.dot(x_high, weight_high, part)
            acc += part
        else:
            acc = tl.dot(x_high, weight_high, acc)

    row = m_start + tl.arange(0, BLOCK_M)
    y = row // row_width
    x = row % row_width
    n = n_start + tl.arange(0, BLOCK_N)
    n_mask = n < N
    mask = ((y < H) & (x < W))[:, None] & n_mask[None, :]
    x_unit = power_of_two(-scale_exponent(tl.load(x_bound_ptr)))
    weight_unit = power_of_two(-scale_exponent(tl.load(weight_bound_ptr + n, mask=n_mask, other=1.0)))
    out = acc * x_unit * weight_unit[None, :] + tl.load(bias_ptr + n, mask=n_mask, other=0.0)[None, :]
    frame_start = frame.to(tl.int64) * H * W * N
    offset = (y * W + x)[:, None] * N + n[None, :]
    tl.store(out_ptr + frame_start + offset, out, mask=mask)


def conv3d_ref(x: SplitRows, weight: SplitWeight, bias: Tensor, *, clip: int, time_stride: int = 1) -> Tensor:
    """As ``conv3d``, in the dtype of ``bias``."""
    frames = join_ref(x.rows, x.bound).unflatten(0, (-1, clip, x.frame_rows)).to(bias.dtype)  # (B, T, rows, C)
    taps = join_ref(weight.rows, weight.bound.repeat(x.taps)[:, None]).unflatten(0, (x.taps, -1)).to(bias.dtype)
    if x.taps == 27:
        frames = torch.nn.functional.pad(frames, (0, 0, 0, 0, 2, 0))
    pixels = torch.arange(x.height)[:, None] * x.row_width + torch.arange(x.width)  # (H, W)
    products = []
    for tap in range(x.taps):
        of_clip = frames[:, tap // 9 : tap // 9 + clip : time_stride]
        read = of_clip[:, :, pixels.to(frames.device) + x.tap_rows(tap % 9 // 3, tap % 3)]  # (B, T', H, W, C)
        products.append(read @ taps[tap].T)
    out = torch.stack(products).sum(0)
    return out.flatten(0, 1) + bias


def conv3d(x: SplitRows, weight: SplitWeight, bias: Tensor, *, clip: int, time_stride: int = 1) -> Tensor:
    """x: B * clip frames; bias: (N,) fp32 -> (B * T, H, W, N) fp32, T = (clip - 1) // time_stride + 1."""
    if not use_triton("conv3d", bias.device, None):
        return conv3d_ref(x, weight, bias, clip=clip, time_stride=time_stride)
    tile = TILES[x.planes]
    frames_out = (clip - 1) // time_stride + 1
    num_frames = x.num_frames // clip * frames_out
    shape = (num_frames, x.height, x.width, len(bias))
    out = torch.empty(shape, dtype=torch.float32, device=bias.device)
    num_blocks_m = triton.cdiv((x.height - 1) * x.row_width + x.width, tile.pixels)
    num_blocks_n = triton.cdiv(len(bias), tile.outputs)
    x_rows, weight_rows = x.rows.flatten(0, 1), weight.rows.flatten(0, 1)
    with torch.cuda.device_of(bias):
        _conv3d_kernel[(num_frames * num_blocks_m * num_blocks_n,)](
            out,
            TensorDescriptor.from_tensor(x_rows, [tile.pixels, tile.channels]),
            TensorDescriptor.from_tensor(weight_rows, [tile.outputs, tile.channels]),
            bias, x.bound, weight.bound,
            clip, frames_out, x.frame_rows, x.row_width, x.height, x.width, x.channels, len(bias),
            x.rows.shape[1], weight.rows.shape[1], num_blocks_m, num_blocks_n,
            TAPS=x.taps, TIME_STRIDE=time_stride, PLANES=x.planes,
            BLOCK_M=tile.pixels, BLOCK_N=tile.outputs, BLOCK_K=tile.channels,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return out
