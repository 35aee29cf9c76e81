"""Media as the encoder sees them: sizes, pixel patches and rotary positions, in plain torch.

Equal to the Qwen3-VL image and video processors of transformers, which need torchvision; this does not.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from comfyui_h3.h3core.errors import CheckpointError, RequestError

MAX_ASPECT = 200
_PROCESSOR = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelLimits:
    """Area bounds of the encoder's resize, in pixels (for a video, of all frames together), as processor files say."""

    image_min: int = 65_536
    image_max: int = 16_777_216
    video_min: int = 4_096
    video_max: int = 25_165_824

    @classmethod
    def from_folder(cls, folder: Path) -> PixelLimits:
        """From a checkpoint's ``processor/`` folder. Raises CheckpointError when a file is not like the release's."""
        image, video = (
            _edges(folder / name) for name in ("preprocessor_config.json", "video_preprocessor_config.json")
        )
        return cls(image_min=image[0], image_max=image[1], video_min=video[0], video_max=video[1])


def _edges(path: Path) -> tuple[int, int]:
    """The smallest and largest area of one processor file, which calls them edges."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        size = values["size"]
        found = int(size["shortest_edge"]), int(size["longest_edge"])
        fixed = {name: values[name] for name in _PROCESSOR}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not the processor config of H3 ({error!r}); take that of the release"
        ) from error
    if fixed != _PROCESSOR or not 0 < found[0] <= found[1]:
        raise CheckpointError(f"{path} has {fixed}, size {size}; H3 needs {_PROCESSOR}; take the file of the release")
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VisualPatches:
    """One image or video. patches: (grid_t * grid_h * grid_w, 3 * 2 * 16 * 16) float32; grid in patches (t, h, w)."""

    patches: Tensor
    grid: tuple[int, int, int]

    def num_tokens_per_block(self, merge_size: int = 2) -> int:
        """Rows of one temporal block after the patches of a merge window are joined."""
        return self.grid[1] * self.grid[2] // merge_size**2


def resized(height: int, width: int, num_frames: int, *, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Encoder size of ``num_frames`` frames (1 for an image): both sides multiples of 32, the area within the bounds.

    Raises RequestError when one side is more than 200 times the other.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise RequestError(f"{width}x{height} is longer than {MAX_ASPECT}:1; crop it")
    unit = 32
    frames = round(num_frames / 2) * 2 if num_frames > 1 else 1  # halves round to even, as in the processor
    new_height, new_width = (max(unit, round(side / unit) * unit) for side in (height, width))
    if frames * new_height * new_width > max_pixels:
        beta = math.sqrt(num_frames * height * width / max_pixels)
        return tuple(max(unit, math.floor(side / beta / unit) * unit) for side in (height, width))  # type: ignore[return-value]
    if frames * new_height * new_width < min_pixels:
        beta = math.sqrt(min_pixels / (num_frames * height * width))
        return tuple(math.ceil(side * beta / unit) * unit for side in (height, width))  # type: ignore[return-value]
    return new_height, new_width


def image_patches(image: Tensor, limits: PixelLimits) -> VisualPatches:
    """image: (H, W, 3) uint8. The one frame fills both frames of a temporal patch."""
    size = resized(image.shape[0], image.shape[1], 1, min_pixels=limits.image_min, max_pixels=limits.image_max)
    return _patchify(_resize(image[None], size).expand(2, -1, -1, -1))


def video_patches(frames: Tensor, limits: PixelLimits) -> VisualPatches:
    """frames: (m, H, W, 3) uint8, sampled at 2 fps, m >= 2; an odd last frame is repeated.

    Raises RequestError for a single frame.
    """
    num_frames, height, width, _ = frames.shape
    if num_frames < 2:
        raise RequestError("a reference video needs at least 2 sampled frames (13 frames at 24 fps)")
    size = resized(height, width, num_frames, min_pixels=limits.video_min, max_pixels=limits.video_max)
    frames = _resize(frames, size)
    if num_frames % 2:
        frames = torch.cat([frames, frames[-1:]])
    return _patchify(frames)


def _resize(frames: Tensor, size: tuple[int, int]) -> Tensor:
    """(m, H, W, 3) uint8 -> (m, 3, *size) uint8: bicubic with antialias on uint8, nothing when the size is right."""
    frames = frames.movedim(-1, 1)
    if tuple(frames.shape[-2:]) == size:
        return frames
    return F.interpolate(frames.contiguous(), size=size, mode="bicubic", antialias=True)


def _patchify(frames: Tensor) -> VisualPatches:
    """(m, 3, H, W) uint8, m even -> patches ordered by block, merge window (2 x 2), then patch in the window."""
    num_frames, _, height, width = frames.shape
    pixels = (frames.float() - 127.5) / 127.5
    grid = (num_frames // 2, height // 16, width // 16)
    pixels = pixels.view(grid[0], 2, 3, grid[1] // 2, 2, 16, grid[2] // 2, 2, 16)
    pixels = pixels.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)  # t, H/32, W/32, 2, 2, channel, frame, 16, 16
    return VisualPatches(patches=pixels.reshape(-1, 3 * 2 * 16 * 16), grid=grid)


def position_ids(blocks: list[tuple[int, int]], is_visual: Tensor, merge_size: int = 2) -> Tensor:
    """Rotary positions (3, L) int64 of a presentation.

    blocks: (grid_h, grid_w) of each visual block (an image, or one temporal block of a video) in order of appearance.
    is_visual: (L,) bool, True at its pad rows. Text advances all three axes by one; a block keeps one time and spans
    its merged grid, then the clock moves on by the longer side.
    """
    out = torch.empty(3, len(is_visual), dtype=torch.int64)
    cursor = row = 0
    remaining = iter(blocks)
    visual = is_visual.tolist()
    while row < len(visual):
        if not visual[row]:
            out[:, row] = cursor
            cursor, row = cursor + 1, row + 1
            continue
        height, width = (side // merge_size for side in next(remaining))
        count = height * width
        index = torch.arange(count)
        out[0, row : row + count] = cursor
        out[1, row : row + count] = cursor + index // width
        out[2, row : row + count] = cursor + index % width
        cursor, row = cursor + max(height, width), row + count
    return out
