"""Positions (t, h, w) of the rows of a packed sequence, in float64.

The clock counts text rows, then media time: one pixel frame is 5/3 of a unit and one audio latent 1, so picture and
sound agree at 40 units per second. Positions of a picture are centred and scaled by its area, so canvases of any size
and ratio cover about the same range.
"""

from __future__ import annotations

import numpy as np

from comfyui_h3.h3core.media.canvas import LATENT_SPANS
from comfyui_h3.h3core.models.dit.config import PATCH

UNITS_PER_FRAME = 5.0 / 3.0


def spatial_axes(latent_height: int, latent_width: int) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates of a frame's patches, (height / 2,) and (width / 2,) float64: centred, scaled by area, times 32."""
    area = np.sqrt(latent_height * latent_width)

    def axis(size: int) -> np.ndarray:
        ratio = size / area
        left = (1.0 - ratio) / 2.0
        return np.linspace(left, left + ratio, size // PATCH, endpoint=False) * 32.0

    return axis(latent_height), axis(latent_width)


def latent_times(num_latent_frames: int) -> np.ndarray:
    """Start of each latent frame on the media clock, (T,) float64: exclusive running sum of 5/3 * (1, 4, 4, 4, 4)."""
    return np.concatenate([[0.0], np.cumsum(_spans(num_latent_frames))[:-1]])


def clip_span(num_latent_frames: int) -> float:
    """How far a reference clip moves the clock. Added up in order: the last bits are those of the reference."""
    return sum(_spans(num_latent_frames))


def keyframe_time(frame: int, num_frames: int, num_latent_frames: int) -> float:
    """Where a keyframe stands on the media clock."""
    if frame == num_frames - 1:  # equal to the other line but for the last bits, which are those of the reference
        return float(np.sum(np.array(_spans(num_latent_frames)))) - UNITS_PER_FRAME
    return UNITS_PER_FRAME * frame


def text_positions(num_text: int) -> np.ndarray:
    """(L, 3): the number of the row, 0, 0."""
    positions = np.zeros((num_text, 3))
    positions[:, 0] = np.arange(num_text)
    return positions


def video_positions(times: np.ndarray, grid_h: np.ndarray, grid_w: np.ndarray) -> np.ndarray:
    """(T * h * w, 3): frame by frame, row by row."""
    return np.stack(np.meshgrid(times, grid_h, grid_w, indexing="ij"), axis=-1).reshape(-1, 3)


def audio_positions(cursor: float, num_audio_latents: int, grid_w: np.ndarray) -> np.ndarray:
    """(2 * A, 3): the left channel at the first value of the picture's w axis, then the right one at its last."""
    positions = np.zeros((2, num_audio_latents, 3))
    positions[:, :, 0] = cursor + np.arange(num_audio_latents)
    positions[0, :, 2] = grid_w[0]
    positions[1, :, 2] = grid_w[-1]
    return positions.reshape(-1, 3)


def _spans(num_latent_frames: int) -> list[float]:
    return [UNITS_PER_FRAME * LATENT_SPANS[i % 5] for i in range(num_latent_frames)]
