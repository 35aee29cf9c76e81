"""Sizes of media as the encoder sees them."""

import json
import shutil

import pytest
import torch

from comfyui_h3.h3core.errors import CheckpointError, RequestError
from comfyui_h3.h3core.models.text_encoder.vision import PixelLimits, image_patches, resized, video_patches

LIMITS = PixelLimits()


@pytest.mark.parametrize(
    ("frames", "sampled", "size"),
    [
        (107, 9, (768, 1344)),
        (124, 11, (768, 1344)),
        (243, 21, (768, 1344)),
        (294, 25, (768, 1344)),
        (311, 26, (736, 1280)),
        (345, 29, (704, 1216)),
        (362, 31, (672, 1184)),
    ],
)
def test_long_videos_shrink_as_the_release_does(frames, sampled, size):
    assert len(range(0, frames, 12)) == sampled
    assert resized(768, 1344, sampled, min_pixels=LIMITS.video_min, max_pixels=LIMITS.video_max) == size


@pytest.mark.parametrize(
    ("size", "grid", "tokens"),
    [((768, 1344), (1, 48, 84), 1008), ((64, 64), (1, 16, 16), 64), ((2048, 3648), (1, 128, 228), 7296)],
)
def test_image_tokens(size, grid, tokens):
    patches = image_patches(torch.zeros(*size, 3, dtype=torch.uint8), LIMITS)
    assert patches.grid == grid
    assert patches.num_tokens_per_block() == tokens
    assert patches.patches.shape == (grid[1] * grid[2], 1536)


def test_pixel_values_are_in_minus_one_to_one():
    image = torch.tensor([0, 255], dtype=torch.uint8).repeat(256, 128)[..., None].expand(-1, -1, 3)
    values = image_patches(image, LIMITS).patches
    assert (values.min(), values.max()) == (-1, 1)


def test_single_frame_is_not_a_video():
    with pytest.raises(RequestError, match="2 sampled frames"):
        video_patches(torch.zeros(1, 64, 64, 3, dtype=torch.uint8), LIMITS)


def test_extreme_ratio_is_refused():
    with pytest.raises(RequestError, match="200:1"):
        image_patches(torch.zeros(1, 201, 3, dtype=torch.uint8), LIMITS)


@pytest.mark.parametrize("partition", ["FL2VA", "Ref2VA"])
def test_pixel_limits_of_the_release(official_data, partition):
    assert PixelLimits.from_folder(official_data / partition / "processor") == PixelLimits()


def test_pixel_limits_are_those_of_the_checkpoint(tiny_h3):
    limits = PixelLimits.from_folder(tiny_h3 / "FL2VA" / "processor")
    assert limits == PixelLimits(image_min=4096)


@pytest.mark.parametrize(
    "change",
    [
        {"size": {"longest_edge": 10}},
        {"size": {"longest_edge": 10, "shortest_edge": 20}},
        {"patch_size": 14},
        {"size": 3},
    ],
)
def test_processor_of_another_model_is_refused(tiny_h3, tmp_path, change):
    folder = shutil.copytree(tiny_h3 / "FL2VA" / "processor", tmp_path / "processor")
    file = folder / "video_preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=r"video_preprocessor_config\.json"):
        PixelLimits.from_folder(folder)
    file.unlink()
    with pytest.raises(CheckpointError, match="FileNotFound"):
        PixelLimits.from_folder(folder)
