"""The convolution of ``conv3d`` at stride 1, two neighbouring pixels of a row at a time, with 4 products for their 6.

Of the four inputs d0..d3 that the pixels 2p and 2p + 1 read in one row, and the three weights g0..g2 of it,
    m0 = (d0 - d2) * g0                     even = m0 + m1 + m2
    m1 = (d1 + d2) * (g0 + g1 + g2) / 2     odd  = m1 - m2 - m3
    m2 = (d2 - d1) * (g0 - g1 + g2) / 2
    m3 = (d1 - d3) * g2
(S. Winograd's F(2, 3), along a row; A. Lavin, S. Gray, "Fast Algorithms for Convolutional Neural Networks", 2016). The
four sums of inputs are the rows that the kernel reads, split into float16 halves like the four weights, and the three
products of halves are added up as ``conv3d`` does: BLOCK_K channels in the tensor cores, then rounded in registers.
The square of the error grows by 5 / 3 on operands of random sign.

On an H200 it takes 0.73 of the time of nine taps, and with one plane as long; but there the encoder as a whole runs
faster, which a GPU at the limit of its power does when it multiplies less.

H3: F = 17, 9 or 5 frames of a tile, from 256 x 256 x 128 to 16 x 16 x 1024, 24 convolutions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from comfyui_h3.kernels._triton import TensorDescriptor, tl, triton
from comfyui_h3.kernels.compiled_once import jit_for_any
from comfyui_h3.kernels.conv3d import Tile
from comfyui_h3.kernels.dispatch import use_triton
from comfyui_h3.kernels.split_half import SplitWeight, join_ref, power_of_two, scale_exponent, split_ref

# Key: planes. The best of a sweep on an H200, at the sizes of the first two levels.
TILES = {
    2: Tile(pixels=128, outputs=128, channels=64, num_warps=8, num_stages=3),
    1: Tile(pixels=128, outputs=128, channels=64, num_warps=8, num_stages=4),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairRows:
    """F frames of a convolution's input. Output pair (y, p) of frame f reads, for sum i at tap row dy, the row
    ``((f * 4 + i) * (height + 2) + y + dy) * pairs + p``.

    rows: (planes, F * 4 * (height + 2) * pairs, C) float16, planes 2 (high, low) or 1. bound: () float32, of their
    values, see ``split_half``. width may be odd: the last pair then has no odd pixel.
    """

    rows: Tensor
    bound: Tensor
    height: int
    width: int

    @property
    def pairs(self) -> int:
        return (self.width + 1) // 2

    @property
    def frame_rows(self) -> int:
        return 4 * (self.height + 2) * self.pairs


def sums_of_inputs(padded: Tensor) -> Tensor:
    """padded (F, H + 2, 2 * P + 2, C) -> (F, 4, H + 2, P, C)."""
    d0, d1, d2, d3 = (padded[:, :, i : padded.shape[2] - 2 + i : 2] for i in range(4))
    return torch.stack([d0 - d2, d1 + d2, d2 - d1, d1 - d3], dim=1)


def pair_weight(weight: Tensor, planes: int) -> SplitWeight:
    """weight (N, C, 3, 3, 3) fp32 -> its rows (planes, 36 * N, C) in the order (dt, dy, sum, output)."""
    g0, g1, g2 = weight.double().unbind(-1)
    sums = torch.stack([g0, (g0 + g1 + g2) / 2, (g0 - g1 + g2) / 2, g2], dim=-1)
    return SplitWeight.of(sums.float(), planes)


@jit_for_any("clip", "H", "W", "C", "x_plane", "weight_plane", "num_blocks_m", "num_blocks_n")
def _conv3d_pairs_kernel(
    out_ptr, x_rows, weight_rows, residual_ptr, bias_ptr, x_bound_ptr, weight_bound_ptr,
    clip, H, W, C, N, x_plane, weight_plane, num_blocks_m, num_blocks_n,
    PLANES: tl.constexpr, RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_M pairs of one frame times BLOCK_N output channels."""
    program = tl.program_id(0)
    n_start = program % num_blocks_n * BLOCK_N
    m_start = program // num_blocks_n % num_blocks_m * BLOCK_M
    frame = program // (num_blocks_n * num_blocks_m)
    pairs = (W + 1) // 2
    sum_rows = (H + 2) * pairs
    steps = tl.cdiv(C, BLOCK_K)
    first = tl.maximum(0, 2 - frame % clip) * 12  # frames before the clip are zero
    even = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    odd = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(first * steps, 36 * steps):
        tap = step // steps  # (dt, dy, index)
        channel = step % steps * BLOCK_K
        index = tap % 4
        x_row = ((frame - 2 + tap // 12) * 4 + index) * sum_rows + tap % 12 // 4 * pairs + m_start
        weight_row = tap * N + n_start
        x_high = x_rows.load([x_row, channel])
        weight_high = weight_rows.load([weight_row, channel]).T
        if PLANES == 2:
            x_low = x_rows.load([x_plane + x_row, channel])
            weight_low = weight_rows.load([weight_plane + weight_row, channel]).T
            part = tl.dot(x_low, weight_high)
            part = tl.dot(x_high, weight_low, part)
            part = tl.dot(x_high, weight_high, part)
        else:
            part = tl.dot(x_high, weight_high)
        even += tl.where(index == 3, 0.0, 1.0) * part
        odd += tl.where(index == 0, 0.0, tl.where(index == 1, 1.0, -1.0)) * part

    pair = m_start + tl.arange(0, BLOCK_M)
    y = pair // pairs
    x = pair % pairs * 2
    n = n_start + tl.arange(0, BLOCK_N)
    n_mask = n < N
    x_unit = power_of_two(-scale_exponent(tl.load(x_bound_ptr)))
    weight_unit = power_of_two(-scale_exponent(tl.load(weight_bound_ptr + n, mask=n_mask, other=1.0)))[None, :]
    bias = tl.load(bias_ptr + n, mask=n_mask, other=0.0)[None, :]
    frame_start = frame.to(tl.int64) * H * W * N
    offset = (y * W + x)[:, None] * N + n[None, :]
    mask = (y < H)[:, None] & n_mask[None, :]
    even = even * x_unit * weight_unit + bias
    if RESIDUAL:
        even += tl.load(residual_ptr + frame_start + offset, mask=mask, other=0.0)
    tl.store(out_ptr + frame_start + offset, even, mask=mask)
    offset += N
    mask = mask & (x + 1 < W)[:, None]
    odd = odd * x_unit * weight_unit + bias
    if RESIDUAL:
        odd += tl.load(residual_ptr + frame_start + offset, mask=mask, other=0.0)
    tl.store(out_ptr + frame_start + offset, odd, mask=mask)


def conv3d_pairs_ref(
    x: PairRows, weight: SplitWeight, bias: Tensor, *, clip: int, residual: Tensor | None = None
) -> Tensor:
    """As ``conv3d_pairs``."""
    sums = join_ref(x.rows, x.bound).unflatten(0, (-1, clip, 4, x.height + 2, x.pairs))  # (B, T, 4, H + 2, P, C)
    sums = torch.nn.functional.pad(sums, (0, 0, 0, 0, 0, 0, 0, 0, 2, 0))
    taps = join_ref(weight.rows, weight.bound.repeat(36)[:, None]).unflatten(0, (3, 3, 4, -1))
    products = [
        torch.einsum("btiypc,inc->ibtypn", sums[:, dt : dt + clip, :, dy : dy + x.height], taps[dt, dy])
        for dt in range(3)
        for dy in range(3)
    ]
    m = torch.stack(products).sum(0)  # (4, B, T, H, P, N)
    pair = torch.stack([m[0] + m[1] + m[2], m[1] - m[2] - m[3]], dim=4)  # (B, T, H, P, 2, N)
    out = pair.flatten(3, 4)[:, :, :, : x.width].flatten(0, 1) + bias
    return out if residual is None else out + residual


def conv3d_pairs(
    x: PairRows, weight: SplitWeight, bias: Tensor, *, clip: int, residual: Tensor | None = None
) -> Tensor:
    """x: B * clip frames; weight: of ``pair_weight``; bias: (N,) fp32; residual: like the output, which takes its
    memory -> (B * clip, H, W, N) fp32."""
    if not use_triton("conv3d_pairs", bias.device, None):
        return conv3d_pairs_ref(x, weight, bias, clip=clip, residual=residual)
    planes, num_rows, channels = x.rows.shape
    tile = TILES[planes]
    num_frames = num_rows // x.frame_rows
    shape = (num_frames, x.height, x.width, len(bias))
    out = torch.empty(shape, dtype=torch.float32, device=bias.device) if residual is None else residual
    num_blocks_m = triton.cdiv(x.height * x.pairs, tile.pixels)
    num_blocks_n = triton.cdiv(len(bias), tile.outputs)
    with torch.cuda.device_of(bias):
        _conv3d_pairs_kernel[(num_frames * num_blocks_m * num_blocks_n,)](
            out,
            TensorDescriptor.from_tensor(x.rows.flatten(0, 1), [tile.pixels, tile.channels]),
            TensorDescriptor.from_tensor(weight.rows.flatten(0, 1), [tile.outputs, tile.channels]),
            out, bias, x.bound, weight.bound,
            clip, x.height, x.width, channels, len(bias), num_rows, weight.rows.shape[1], num_blocks_m, num_blocks_n,
            PLANES=planes, RESIDUAL=residual is not None,
            BLOCK_M=tile.pixels, BLOCK_N=tile.outputs, BLOCK_K=tile.channels,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return out


def split_pairs(padded: Tensor, bound: Tensor, width: int, planes: int) -> PairRows:
    """padded: (F, H + 2, W + 2, C) fp32, a column more where W is odd; bound: () of the sums."""
    rows = split_ref(sums_of_inputs(padded), bound, planes).flatten(1, 4)
    return PairRows(rows=rows, bound=bound, height=padded.shape[1] - 2, width=width)
