"""Frames of a canvas out of the raw tiles of one time window: blended in space, then in time, and rounded to 8 bits.

A tile is P patches in the order (t, y, x), of (C, dt, U, U) values each. A pixel belongs to one tile. Where it lies in
the first ``o`` rows of it, which the tile above covers too, at row k, it becomes
    above * (1 - k / o) + own * (k / o),
then the same with the raw tile to the left, and, in the first frames of a window, with the end of the window before.
The result is that value, or round(255 * clamp((value - mean[c]) / std[c], 0, 1)) in the layout of a picture.

H3: 1344x768 is 28 tiles of 7 x 16 x 16 patches, C = 3, dt = 4, U = 16, and 17 of 28 frames; float32.
Rounding: every product, sum and quotient to fp32, no fused multiply-add, and halves to even, as in eager PyTorch: equal
to the reference bit for bit.
"""

import functools
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from comfyui_h3.kernels._triton import tl, triton
from comfyui_h3.kernels.dispatch import rows_of, use_triton
from comfyui_h3.kernels.launch import Launch, pick

# block: patches of one program.
LAUNCH = {(9, 0): Launch(block=1, num_warps=2), None: Launch(block=1, num_warps=2)}


class Axis(Protocol):
    """Tiles along one axis, in patches: tile i covers ``size`` from starts[i] on, overlaps[i] of it with the next."""

    @property
    def size(self) -> int: ...
    @property
    def starts(self) -> tuple[int, ...]: ...
    @property
    def overlaps(self) -> tuple[int, ...]: ...
    def __hash__(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TileGrid:
    """Where the tiles of a canvas lie, in row-major order, and the sizes (C, dt, U, U) of one of their patches."""

    rows: Axis
    cols: Axis
    patch: tuple[int, int, int, int]

    @property
    def frame_shape(self) -> tuple[int, int]:
        """Height and width in pixels."""
        height, width = ((axis.starts[-1] + axis.size) * self.patch[-1] for axis in (self.rows, self.cols))
        return height, width


@functools.lru_cache(maxsize=64)
def blend_weights(extent: int, device: torch.device) -> Tensor:
    """k / extent for k = 0..extent-1, fp32. Divided on the CPU: a GPU multiplies by 1 / extent and may be 1 ulp off."""
    return (torch.arange(extent, dtype=torch.float32, device="cpu") / extent).to(device)


def blend_into(after: Tensor, before: Tensor, dim: int) -> None:
    """Fade from ``before``, the end of the earlier piece, into the start of ``after``, in place along ``dim`` < 0.

    The fade is as long as ``before``; where ``after`` is shorter (its end belongs to the next tile) it stops early.
    """
    extent = before.shape[dim]
    length = min(extent, after.shape[dim])
    weight = blend_weights(extent, after.device)[:length].to(after.dtype).view(-1, *[1] * (-dim - 1))
    target = after.narrow(dim, 0, length)
    # Two rounded products, then the sum: no fused multiply-add, as the reference.
    target.copy_(before.narrow(dim, 0, length) * (1 - weight) + target * weight)


def unpatch(patches: Tensor, grid: TileGrid) -> Tensor:
    """(B, P, C * dt * U * U) -> (B, C, F, tile height, tile width)."""
    channels, _, unit, _ = grid.patch
    num_tiles, height, width = len(patches), grid.rows.size, grid.cols.size
    x = patches.view(num_tiles, -1, height, width, *grid.patch)
    x = x.permute(0, 4, 1, 5, 2, 6, 3, 7)  # (B, C, T, dt, h, U, w, U)
    return x.reshape(num_tiles, channels, -1, height * unit, width * unit)


def blend_tiles_ref(tiles: Tensor, grid: TileGrid, first: int, num_frames: int, before: Tensor | None) -> Tensor:
    unit = grid.patch[-1]
    raw = unpatch(tiles, grid)[:, :, first : first + num_frames]
    out = raw.new_empty(*raw.shape[1:3], *grid.frame_shape)
    num_cols = len(grid.cols.starts)
    for index, tile in enumerate(raw):
        i, j = divmod(index, num_cols)
        height, width = (_kept(axis, n) * unit for axis, n in ((grid.rows, i), (grid.cols, j)))
        top, left = grid.rows.starts[i] * unit, grid.cols.starts[j] * unit
        region = out[..., top : top + height, left : left + width]
        region.copy_(tile[..., :height, :width])
        if i > 0:
            shared = grid.rows.overlaps[i - 1] * unit
            blend_into(region, raw[index - num_cols][..., -shared:, :width], dim=-2)
        if j > 0:
            shared = grid.cols.overlaps[j - 1] * unit
            blend_into(region, raw[index - 1][..., :height, -shared:], dim=-1)
    if before is not None:
        blend_into(out, before, dim=-3)
    return out


def blend_tiles_to_uint8_ref(
    tiles: Tensor, grid: TileGrid, first: int, num_frames: int, before: Tensor | None, statistics: Tensor, bad: Tensor
) -> Tensor:
    pixels = blend_tiles_ref(tiles, grid, first, num_frames, before)
    bad |= ~pixels.isfinite().all()
    mean, std = statistics.view(2, -1, 1, 1, 1)
    pixels = pixels.sub_(mean).div_(std).clamp_(0, 1)
    return pixels.mul_(255).round_().to(torch.uint8).movedim(0, -1).contiguous()


def _kept(axis: Axis, index: int) -> int:
    """Patches of tile ``index`` that stay: its end belongs to the next tile."""
    return axis.size - axis.overlaps[index] if index < len(axis.overlaps) else axis.size


@functools.lru_cache(maxsize=64)
def _place_of_patches(axis: Axis, device: torch.device) -> Tensor:
    """For each patch along the canvas: its tile, its place there, and how many patches the tile before it shares, 0
    where that does not reach; (num_patches, 3) int32."""
    table = []
    for index, start in enumerate(axis.starts):
        before = axis.overlaps[index - 1] if index else 0
        table += [(index, place, before if place < before else 0) for place in range(_kept(axis, index))]
        assert len(table) == start + _kept(axis, index)
    return torch.tensor(table, dtype=torch.int32, device=device)


@triton.jit
def _place(ptr):
    """One row of ``_place_of_patches``."""
    return tl.load(ptr), tl.load(ptr + 1), tl.load(ptr + 2)


@triton.jit
def _weight(place, shared, offset, UNIT: tl.constexpr):
    """Share of the pixel's own tile, 1 where no other reaches."""
    extent = tl.maximum(shared, 1) * UNIT * 1.0
    return tl.where(shared > 0, tl.div_rn((place * UNIT + offset).to(tl.float32), extent), 1.0)


@triton.jit
def _blend_tiles_kernel(
    out_ptr, bad_ptr, tiles_ptr, before_ptr, rows_ptr, cols_ptr, statistics_ptr,
    first, num_frames, num_before, num_patches, grid_cols, num_tile_cols, tile_rows, tile_cols, height, width,
    C: tl.constexpr, DT: tl.constexpr, UNIT: tl.constexpr, TO_UINT8: tl.constexpr,
):  # fmt: skip
    grid_row, grid_col = tl.program_id(0) // grid_cols, tl.program_id(0) % grid_cols
    frame = tl.program_id(1)
    row, place_y, shared_y = _place(rows_ptr + 3 * grid_row)
    col, place_x, shared_x = _place(cols_ptr + 3 * grid_col)
    dy, dx = tl.arange(0, UNIT)[:, None], tl.arange(0, UNIT)[None, :]
    y, x = grid_row * UNIT + dy, grid_col * UNIT + dx
    weight_y = _weight(place_y, shared_y, dy, UNIT)  # [UNIT, 1]
    weight_x = _weight(place_x, shared_x, dx, UNIT)  # [1, UNIT]
    weight_t = tl.where(frame < num_before, tl.div_rn(frame * 1.0, tl.maximum(num_before, 1) * 1.0), 1.0)

    # Patches of one tile and frame lie in rows; int64, as a large canvas passes 2**31 values.
    tile = (row * num_tile_cols + col).to(tl.int64) * num_patches
    token = (first + frame) // DT * tile_rows
    own = tile + (token + place_y) * tile_cols + place_x
    above = tile - num_tile_cols * num_patches + (token + place_y + tile_rows - shared_y) * tile_cols + place_x
    left = tile - num_patches + (token + place_y) * tile_cols + place_x + tile_cols - shared_x
    inside = (first + frame) % DT * UNIT * UNIT + dy * UNIT + dx  # [UNIT, UNIT]
    zero = inside * 0  # makes a mask of the whole patch from one number
    for c in tl.static_range(C):
        patch = tiles_ptr + c * DT * UNIT * UNIT + inside
        value = tl.load(patch + own * (C * DT * UNIT * UNIT))
        other = tl.load(patch + above * (C * DT * UNIT * UNIT), mask=zero + shared_y > 0, other=0.0)
        value = other * (1.0 - weight_y) + value * weight_y
        other = tl.load(patch + left * (C * DT * UNIT * UNIT), mask=zero + shared_x > 0, other=0.0)
        value = other * (1.0 - weight_x) + value * weight_x
        at = ((c * num_before + frame).to(tl.int64) * height + y) * width + x
        other = tl.load(before_ptr + at, mask=zero + frame < num_before, other=0.0)
        value = other * (1.0 - weight_t) + value * weight_t
        if TO_UINT8:
            tl.store(bad_ptr + zero, 1, mask=(value != value) | (tl.abs(value) == float("inf")))
            value = tl.div_rn(value - tl.load(statistics_ptr + c), tl.load(statistics_ptr + C + c))
            value = tl.minimum(tl.maximum(value, 0.0), 1.0) * 255.0
            value = (value + 8388608.0) - 8388608.0  # 2**23: there, fp32 holds whole numbers, and the sum is rounded
            at = ((frame.to(tl.int64) * height + y) * width + x) * C + c
            tl.store(out_ptr + at, value.to(tl.uint8))
        else:
            at = ((c * num_frames + frame).to(tl.int64) * height + y) * width + x
            tl.store(out_ptr + at, value)


def blend_tiles(tiles: Tensor, grid: TileGrid, first: int, num_frames: int, before: Tensor | None = None) -> Tensor:
    """tiles: (num_tiles, P, C * dt * U * U) float32; frames [first, first + num_frames) of a window; before: as the
    result, the frames that its first ones fade from -> (C, num_frames, H, W) float32."""
    if not use_triton("blend_tiles", tiles.device, _problem(tiles, grid, before)):
        return blend_tiles_ref(tiles, grid, first, num_frames, before)
    out = torch.empty((grid.patch[0], num_frames, *grid.frame_shape), dtype=torch.float32, device=tiles.device)
    _launch(out, out, tiles, grid, first, num_frames, before, out)
    return out


def blend_tiles_to_uint8(
    tiles: Tensor, grid: TileGrid, first: int, num_frames: int, before: Tensor | None, statistics: Tensor, bad: Tensor
) -> Tensor:
    """As ``blend_tiles``, then (value - mean) / std in [0, 1] as 8 bits -> (num_frames, H, W, C) uint8.

    statistics: (2, C) float32, mean and std. bad: (1,) int32, set to 1 where a value is not finite, else left.
    """
    if not use_triton("blend_tiles_to_uint8", tiles.device, _problem(tiles, grid, before)):
        return blend_tiles_to_uint8_ref(tiles, grid, first, num_frames, before, statistics, bad)
    out = torch.empty((num_frames, *grid.frame_shape, grid.patch[0]), dtype=torch.uint8, device=tiles.device)
    _launch(out, bad, tiles, grid, first, num_frames, before, statistics)
    return out


def _launch(
    out: Tensor, bad: Tensor, tiles: Tensor, grid: TileGrid, first: int, num_frames: int, before: Tensor | None,
    statistics: Tensor,
) -> None:  # fmt: skip
    rows, cols = _place_of_patches(grid.rows, tiles.device), _place_of_patches(grid.cols, tiles.device)
    height, width = grid.frame_shape
    channels, time, unit, _ = grid.patch
    launch = pick(LAUNCH, tiles.device)
    with torch.cuda.device_of(tiles):
        # Without contraction a rounded product stays one.
        _blend_tiles_kernel[(len(rows) * len(cols), num_frames)](
            out, bad, tiles, tiles if before is None else before, rows, cols, statistics,
            first, num_frames, 0 if before is None else before.shape[1], tiles.shape[1], len(cols),
            len(grid.cols.starts), grid.rows.size, grid.cols.size, height, width,
            C=channels, DT=time, UNIT=unit, TO_UINT8=out.dtype == torch.uint8,
            num_warps=launch.num_warps, enable_fp_fusion=False,
        )  # fmt: skip


def _problem(tiles: Tensor, grid: TileGrid, before: Tensor | None) -> str | None:
    """What keeps the tensors from the kernel, or None."""
    given = {} if before is None else {"before": before}
    if problem := rows_of(torch.float32, tiles=tiles, **given):
        return problem
    if not all(tensor.is_contiguous() for tensor in (tiles, *given.values())):
        return "tiles or before is strided"
    unit = grid.patch[-1]
    return f"a patch is {unit} pixels wide, not a power of 2" if unit & (unit - 1) else None
