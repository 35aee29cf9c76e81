"""Tiles, time windows and blends: the tables and formulas of the released model."""

import pytest
import torch

from comfyui_h3.h3core.models.video_vae.tiling import (
    AxisPlan,
    ChunkPlan,
    TileCanvas,
    TilePlan,
    num_frames,
    num_tokens,
)
from comfyui_h3.tests.oracle.vae_oracle import tiny_video_config

CONFIG = tiny_video_config()

# Side in pixels: starts, overlaps.
AXES = {
    32: ([0], []),
    240: ([0], []),
    256: ([0], []),
    288: ([0, 32], [224]),
    384: ([0, 128], [128]),
    448: ([0, 192], [64]),
    512: ([0, 128, 256], [128, 128]),
    576: ([0, 160, 320], [96, 96]),
    640: ([0, 192, 384], [64, 64]),
    704: ([0, 144, 288, 448], [112, 112, 96]),
    768: ([0, 160, 336, 512], [96, 80, 80]),
    832: ([0, 192, 384, 576], [64, 64, 64]),
    1024: ([0, 192, 384, 576, 768], [64] * 4),
    1152: ([0, 176, 352, 528, 704, 896], [80, 80, 80, 80, 64]),
    1280: ([0, 160, 320, 496, 672, 848, 1024], [96, 96, 80, 80, 80, 80]),
    1344: ([0, 176, 352, 528, 704, 896, 1088], [80, 80, 80, 80, 64, 64]),
    2048: ([0, 176, 352, 528, 704, 880, 1056, 1232, 1408, 1600, 1792], [80] * 8 + [64, 64]),
}


@pytest.mark.parametrize("side", AXES)
def test_windows_of_a_side_are_those_of_the_table(side):
    starts, overlaps = AXES[side]
    plan = AxisPlan.cover(side // 16, 16, 4)
    assert [16 * s for s in plan.starts] == starts
    assert [16 * o for o in plan.overlaps] == overlaps
    assert plan.size == min(side // 16, 16)


@pytest.mark.parametrize(("size", "overlap"), [(16, 4), (4, 1), (2, 1)])
def test_windows_cover_every_length_exactly_once(size, overlap):
    for length in range(1, 140):
        plan = AxisPlan.cover(length, size, overlap)
        ends = [start + plan.kept(i) for i, start in enumerate(plan.starts)]
        assert ends == [*plan.starts[1:], length]
        assert all(overlap <= o < size for o in plan.overlaps)


@pytest.mark.parametrize(("height", "width"), [(48, 84), (84, 48)])
def test_the_largest_canvas_has_28_tiles_in_either_orientation(height, width):
    plan = TilePlan.cover(CONFIG, height, width)
    assert plan.num_tiles == 28
    x = torch.zeros(1, height, width)
    assert {plan.cut(x, i, 1).shape for i in range(28)} == {(1, 16, 16)}


@pytest.mark.parametrize("tile_batch", [1, 3, 28, 100])
def test_batches_hold_every_tile_once_and_in_order(tile_batch):
    batches = list(TilePlan.cover(CONFIG, 48, 84).batches(tile_batch))
    assert [i for batch in batches for i in batch] == list(range(28))
    assert max(map(len, batches)) <= tile_batch


TOKENS = {1: 1, 2: 5, 3: 9, 4: 13, 5: 17, 6: 18, 7: 22, 8: 26, 12: 39, 17: 56, 37: 124, 72: 243, 107: 362}


@pytest.mark.parametrize("tokens", TOKENS)
def test_frames_of_a_number_of_latent_frames(tokens):
    assert num_frames(CONFIG, tokens) == TOKENS[tokens]


@pytest.mark.parametrize(
    ("frames", "tokens"),
    [(1, 1), (5, 2), (17, 2), (18, 7), (22, 7), (34, 7), (35, 12), (51, 12), (124, 37), (362, 107)],
)
def test_latent_frames_of_an_encoded_video(frames, tokens):
    assert num_tokens(CONFIG, frames) == tokens


@pytest.mark.parametrize(
    ("tokens", "chunks", "padded"),
    [(2, 1, 7), (3, 1, 7), (7, 1, 7), (8, 2, 12), (12, 2, 12), (37, 7, 37), (107, 21, 107)],
)
def test_windows_in_time(tokens, chunks, padded):
    plan = ChunkPlan.cover(CONFIG, tokens)
    assert (plan.num_chunks, plan.num_padded, plan.stride, plan.size) == (chunks, padded, 5, 7)
    latents = torch.arange(tokens).view(1, tokens, 1, 1)
    last = plan.window(plan.pad(latents), chunks - 1).flatten().tolist()
    assert last == [min(i, tokens - 1) for i in range(5 * chunks - 5, 5 * chunks + 2)]


def fade(a, b, extent, dim):
    """The formula of a blend, over whole pieces."""
    a, b = a.movedim(dim, 0), b.movedim(dim, 0).clone()
    for k in range(extent):
        weight = torch.tensor(k) / extent
        b[k] = a[a.shape[0] - extent + k] * (1 - weight) + b[k] * weight
    return b.movedim(0, dim)


def stitch(raw, plan, scale):
    """All tiles kept whole, mixed with their raw neighbours, cut, and put beside each other."""
    rows = []
    for i in range(len(plan.rows.starts)):
        row = []
        for j in range(len(plan.cols.starts)):
            index = i * len(plan.cols.starts) + j
            tile = raw[index]
            if i:
                tile = fade(raw[index - len(plan.cols.starts)], tile, plan.rows.overlaps[i - 1] * scale, -2)
            if j:
                tile = fade(raw[index - 1], tile, plan.cols.overlaps[j - 1] * scale, -1)
            row.append(tile[..., : plan.rows.kept(i) * scale, : plan.cols.kept(j) * scale])
        rows.append(torch.cat(row, dim=-1))
    return torch.cat(rows, dim=-2)


@pytest.mark.parametrize(("height", "width"), [(6, 11), (4, 5), (9, 7), (3, 29), (4, 4)])
@pytest.mark.parametrize("scale", [1, 2])
def test_the_canvas_equals_blending_whole_raw_tiles(height, width, scale):
    plan = TilePlan.cover(tiny_video_config(tile_size=64, tile_overlap=16), height, width)
    canvas = TileCanvas(plan, scale)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):  # a canvas is used again
        shape = (plan.num_tiles, 3, 2, plan.rows.size * scale, plan.cols.size * scale)
        raw = torch.randn(shape, generator=generator)
        wanted = stitch(raw, plan, scale)
        for batch in plan.batches(3):
            canvas.add(raw[batch.start : batch.stop].clone())
        assert torch.equal(canvas.finish(), wanted)


@pytest.mark.parametrize("tokens", [*range(1, 13), 37, 72])
def test_frames_of_a_window_are_its_own_17_and_the_last_also_its_tail(tokens):
    plan = ChunkPlan.cover(CONFIG, tokens)
    parts = [part for chunk in range(plan.num_chunks) for part in plan.final(chunk)]
    assert sum(map(len, parts)) == plan.num_frames == num_frames(CONFIG, tokens)
    if tokens == 1:
        assert parts == [range(3, 4)]  # the last frame of its window
        return
    assert plan.tail == range(23, 28)
    assert all(part == range(3, 20) for part in parts[: plan.num_chunks - 1])
    whole = [*range(3, 20), *range(23, 28)]
    assert [i for part in plan.final(plan.num_chunks - 1) for i in part] == whole[
        : plan.num_frames - 17 * (plan.num_chunks - 1)
    ]
