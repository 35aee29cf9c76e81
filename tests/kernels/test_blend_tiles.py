"""Tiles joined to frames: the plain formula, the reference, and the kernel."""

from dataclasses import dataclass

import pytest
import torch

from comfyui_h3.kernels.blend_tiles import (
    TileGrid,
    blend_into,
    blend_tiles,
    blend_tiles_ref,
    blend_tiles_to_uint8,
    blend_tiles_to_uint8_ref,
    blend_weights,
    unpatch,
)
from comfyui_h3.kernels.dispatch import backend

# Size of a tile, starts, overlaps: as few patches as show everything, as the interpreter takes milliseconds for each.
ONE = (2, (0,), ())
TWO = (3, (0, 1), (2,))  # an overlap longer than what is kept of a tile
THREE = (3, (0, 1, 3), (2, 1))


@dataclass(frozen=True)
class Windows:
    size: int
    starts: tuple[int, ...]
    overlaps: tuple[int, ...]


def make_grid(rows, cols, unit=4):
    return TileGrid(rows=Windows(*rows), cols=Windows(*cols), patch=(3, 4, unit, unit))


GRIDS = [(ONE, ONE), (TWO, ONE), (ONE, THREE), (TWO, THREE), (THREE, TWO)]


def make_tiles(grid, device, generator, num_tokens=2):
    num_tiles = len(grid.rows.starts) * len(grid.cols.starts)
    num_patches, unit = num_tokens * grid.rows.size * grid.cols.size, grid.patch[-1]
    return torch.randn(num_tiles, num_patches, 12 * unit * unit, device=device, generator=generator)


def make_statistics(device):
    return torch.tensor([[-2.1, -2.0, -1.8], [4.3, 4.4, 4.5]], device=device)


def fade(a, b, extent, dim):
    """The formula of a blend, over whole pieces."""
    a, b = a.movedim(dim, 0), b.movedim(dim, 0).clone()
    for k in range(extent):
        weight = torch.tensor(k) / extent
        b[k] = a[a.shape[0] - extent + k] * (1 - weight) + b[k] * weight
    return b.movedim(0, dim)


def stitch(raw, grid):
    """All tiles kept whole, mixed with their raw neighbours, cut, and put beside each other."""
    unit, num_cols = grid.patch[-1], len(grid.cols.starts)
    rows = []
    for i in range(len(grid.rows.starts)):
        row = []
        for j in range(num_cols):
            tile = raw[i * num_cols + j]
            height, width = grid.rows.size, grid.cols.size
            if i:
                tile = fade(raw[(i - 1) * num_cols + j], tile, grid.rows.overlaps[i - 1] * unit, -2)
            if j:
                tile = fade(raw[i * num_cols + j - 1], tile, grid.cols.overlaps[j - 1] * unit, -1)
            if i < len(grid.rows.overlaps):
                height -= grid.rows.overlaps[i]
            if j < len(grid.cols.overlaps):
                width -= grid.cols.overlaps[j]
            row.append(tile[..., : height * unit, : width * unit])
        rows.append(torch.cat(row, dim=-1))
    return torch.cat(rows, dim=-2)


def test_a_patch_is_a_block_of_frames_rows_and_columns():
    grid = make_grid(ONE, TWO, unit=2)
    tiles = make_tiles(grid, "cpu", torch.Generator().manual_seed(0), num_tokens=3)
    pixels = unpatch(tiles, grid)
    assert pixels.shape == (2, 3, 12, 4, 6)
    t, y, x, c, dt, dy, dx = 2, 1, 2, 1, 3, 0, 1
    value = tiles[1, (t * 2 + y) * 3 + x, ((c * 4 + dt) * 2 + dy) * 2 + dx]
    assert pixels[1, c, 4 * t + dt, 2 * y + dy, 2 * x + dx] == value


@pytest.mark.parametrize("extent", [1, 5, 7, 12, 15, 64, 112])
def test_blend_weights_are_correctly_rounded_quotients(extent, device):
    wanted = torch.tensor([k / extent for k in range(extent)], dtype=torch.float64).float()
    assert torch.equal(blend_weights(extent, device).cpu(), wanted)


def test_a_blend_fades_from_the_earlier_piece_to_the_later():
    after = torch.ones(2, 3, 8)
    blend_into(after, torch.zeros(2, 3, 4), dim=-1)
    assert after[0, 0].tolist() == [0, 0.25, 0.5, 0.75, 1, 1, 1, 1]
    after = torch.ones(2, 3, 8)
    blend_into(after, torch.zeros(2, 5, 8), dim=-2)  # longer than the piece
    torch.testing.assert_close(after[0, :, 0], torch.tensor([0.0, 0.2, 0.4]), rtol=0, atol=0)


@pytest.mark.parametrize("axes", GRIDS)
def test_reference_equals_blending_whole_raw_tiles(axes):
    grid = make_grid(*axes)
    tiles = make_tiles(grid, "cpu", torch.Generator().manual_seed(0))
    wanted = stitch(unpatch(tiles, grid), grid)
    assert wanted.shape[-2:] == grid.frame_shape
    assert torch.equal(blend_tiles_ref(tiles, grid, 0, 8, None), wanted)
    assert torch.equal(blend_tiles_ref(tiles, grid, 3, 2, None), wanted[:, 3:5])


@pytest.mark.parametrize("num_frames", [6, 2])
def test_first_frames_fade_from_the_end_of_the_window_before(num_frames):
    grid = make_grid(TWO, TWO)
    generator = torch.Generator().manual_seed(0)
    tiles = make_tiles(grid, "cpu", generator)
    before = torch.randn(3, 5, *grid.frame_shape, generator=generator)
    whole = fade(before, stitch(unpatch(tiles, grid), grid)[:, 1:], 5, 1)
    assert torch.equal(blend_tiles_ref(tiles, grid, 1, num_frames, before), whole[:, :num_frames])


@pytest.mark.triton
@pytest.mark.parametrize("axes", GRIDS)
@pytest.mark.parametrize(("first", "num_frames", "num_before"), [(2, 3, 0), (3, 4, 2), (3, 1, 5)])
def test_kernel_is_bit_identical_to_reference(axes, first, num_frames, num_before, device, generator):
    grid = make_grid(*axes)
    tiles = make_tiles(grid, device, generator)
    before = torch.randn(3, num_before, *grid.frame_shape, device=device, generator=generator) if num_before else None
    good, also_good = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
    arguments = tiles, grid, first, num_frames, before
    with backend("triton"):
        pixels = blend_tiles(*arguments)
        frames = blend_tiles_to_uint8(*arguments, make_statistics(device), good)
    assert torch.equal(pixels, blend_tiles_ref(*arguments))
    wanted = blend_tiles_to_uint8_ref(*arguments, make_statistics(device), also_good)
    assert frames.is_contiguous()
    assert torch.equal(frames, wanted)
    assert wanted.float().std() > 30
    assert good.item() == also_good.item() == 0


@pytest.mark.triton
def test_kernel_is_bit_identical_on_patches_of_full_size(device, generator):
    grid = make_grid(ONE, THREE, unit=16)
    tiles = make_tiles(grid, device, generator)
    bad = torch.zeros(1, dtype=torch.int32, device=device)
    with backend("triton"):
        frames = blend_tiles_to_uint8(tiles, grid, 3, 2, None, make_statistics(device), bad)
    assert torch.equal(frames, blend_tiles_to_uint8_ref(tiles, grid, 3, 2, None, make_statistics(device), bad))


@pytest.mark.triton
@pytest.mark.parametrize("implementation", ["triton", "torch"])
def test_halves_are_rounded_to_even_and_values_clamped(implementation, device):
    grid = make_grid(ONE, ONE)
    tiles = torch.zeros(1, 4, 3 * 4 * 16, device=device)
    values = torch.tensor([0.5, 1.5, 2.5, -7.0, 254.5, 300.0, 0.49999997, 128.0], device=device)
    tiles[0, 0].view(3, 4, 16)[:, :, :8] = values
    statistics = torch.tensor([[0.0] * 3, [255.0] * 3], device=device)
    # value / 255 * 255 is the value again for these, but for the two that are clamped. Divided by a tensor: a number
    # would become a product with its reciprocal on a GPU.
    again = values / torch.full_like(values, 255.0) * 255
    assert torch.equal(again[[0, 1, 2, 4, 7]], values[[0, 1, 2, 4, 7]])
    with backend(implementation):
        frames = blend_tiles_to_uint8(
            tiles, grid, 0, 1, None, statistics, torch.zeros(1, dtype=torch.int32, device=device)
        )
    assert frames[0, :2, :4, 1].flatten().tolist() == [0, 2, 2, 0, 254, 255, 0, 128]


@pytest.mark.triton
@pytest.mark.parametrize("implementation", ["triton", "torch"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_told(implementation, value, device, generator):
    grid = make_grid(TWO, TWO)
    tiles = make_tiles(grid, device, generator)
    tiles[0, 9, 0] = value  # patch (1, 0, 0), channel 0, frame 4, row 0, column 0: no other tile reaches there
    bad = torch.zeros(1, dtype=torch.int32, device=device)
    with backend(implementation):
        blend_tiles_to_uint8(tiles, grid, 5, 1, None, make_statistics(device), bad)
        assert bad.item() == 0
        blend_tiles_to_uint8(tiles, grid, 4, 1, None, make_statistics(device), bad)
        assert bad.item() == 1
