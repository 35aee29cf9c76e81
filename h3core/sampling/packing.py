"""The packed sequence: text | condition | audio | video rows of one request, with their positions and modalities.

Positions are (t, h, w), built in float64 and rounded to float32 once. The clock counts text rows, then media time: one
pixel frame is 5/3 of a unit and one audio latent 1, so picture and sound agree at 40 units per second.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from comfyui_h3.h3core.models.dit.config import PATCH
from comfyui_h3.h3core.types import AUDIO, VIDEO, ResolvedRequest

_LATENT_SPANS = (1, 4, 4, 4, 4)  # pixel frames behind each latent frame, repeating
_UNITS_PER_FRAME = 5.0 / 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """Rows of one packed sequence: text | condition | audio | video. ``num_audio`` counts both stereo channels."""

    num_text: int
    num_condition: int
    num_audio: int
    num_video: int

    @property
    def num_rows(self) -> int:
        return self.num_text + self.num_condition + self.num_audio + self.num_video

    @property
    def audio(self) -> slice:
        start = self.num_text + self.num_condition
        return slice(start, start + self.num_audio)

    @property
    def video(self) -> slice:
        return slice(self.num_rows - self.num_video, self.num_rows)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedSequence:
    """What stays the same in every step: one attention document of S = layout.num_rows rows.

    modality: (S,) int32, 0 video, 1 text, 2 audio. position_ids: (S, 3) float32, (t, h, w).
    """

    layout: PackedLayout
    modality: Tensor
    position_ids: Tensor

    def timestep_rows(self, video_timestep: Tensor, audio_timestep: Tensor) -> tuple[Tensor, Tensor]:
        """The distinct timesteps of one step, ascending (M,) float32, and the row of each in it, (S,) int32.

        Text rows follow the video's clock. Equal timesteps share one entry (both streams start at 0).
        """
        timesteps, entry = torch.unique(torch.stack([video_timestep, audio_timestep]), return_inverse=True)
        index = torch.full((self.layout.num_rows,), int(entry[0]), dtype=torch.int32)
        index[self.layout.audio] = int(entry[1])
        return timesteps, index


def text_to_video_layout(request: ResolvedRequest, num_text: int) -> PackedLayout:
    """Rows of a request without conditions."""
    rows_per_frame = (request.latent_height // PATCH) * (request.latent_width // PATCH)
    return PackedLayout(
        num_text=num_text,
        num_condition=0,
        num_audio=2 * request.num_audio_latents,
        num_video=request.num_latent_frames * rows_per_frame,
    )


def pack_text_to_video(request: ResolvedRequest, text_modality: Tensor) -> PackedSequence:
    """The sequence of a request without conditions. text_modality: (L,) int32, 1 text, 0 rows of a vision block."""
    num_text = len(text_modality)
    layout = text_to_video_layout(request, num_text)
    cursor = float(num_text)
    grid_h, grid_w = spatial_axes(request.latent_height, request.latent_width)
    text = np.zeros((num_text, 3))
    text[:, 0] = np.arange(num_text)
    positions = np.concatenate(
        [
            text,
            audio_positions(cursor, request.num_audio_latents, grid_w),
            video_positions(cursor + latent_times(request.num_latent_frames), grid_h, grid_w),
        ]
    )
    modality = torch.empty(layout.num_rows, dtype=torch.int32)
    modality[:num_text] = text_modality
    modality[layout.audio] = AUDIO
    modality[layout.video] = VIDEO
    return PackedSequence(layout=layout, modality=modality, position_ids=torch.from_numpy(positions).float())


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
    spans = [_UNITS_PER_FRAME * _LATENT_SPANS[i % 5] for i in range(num_latent_frames)]
    return np.concatenate([[0.0], np.cumsum(spans)[:-1]])


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


def video_to_rows(latents: Tensor) -> Tensor:
    """(C, T, H, W) -> (T * H/2 * W/2, C * 4): one row a patch, channel outermost."""
    channels, frames, height, width = latents.shape
    patches = latents.view(channels, frames, height // PATCH, PATCH, width // PATCH, PATCH)
    return patches.permute(1, 2, 4, 0, 3, 5).reshape(-1, channels * PATCH * PATCH)


def video_from_rows(rows: Tensor, frames: int, height: int, width: int) -> Tensor:
    """(T * H/2 * W/2, C * 4) -> (C, T, H, W), the inverse of ``video_to_rows``; sizes in latents."""
    patches = rows.view(frames, height // PATCH, width // PATCH, -1, PATCH, PATCH)
    return patches.permute(3, 0, 1, 4, 2, 5).reshape(-1, frames, height, width)


def audio_to_rows(latents: Tensor) -> Tensor:
    """(2, C, A) -> (2 * A, C): all rows of the left channel, then all of the right."""
    return latents.permute(0, 2, 1).reshape(-1, latents.shape[1])


def audio_from_rows(rows: Tensor) -> Tensor:
    """(2 * A, C) -> (2, C, A), the inverse of ``audio_to_rows``."""
    return rows.view(2, -1, rows.shape[1]).permute(0, 2, 1).contiguous()
