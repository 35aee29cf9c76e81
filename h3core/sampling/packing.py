"""The packed sequence of one request: text | condition | audio | video rows, with their positions and modalities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from comfyui_h3.h3core.models.dit.config import PATCH
from comfyui_h3.h3core.sampling.positions import (
    audio_positions,
    clip_span,
    keyframe_time,
    latent_times,
    spatial_axes,
    text_positions,
    video_positions,
)
from comfyui_h3.h3core.types import AUDIO, VIDEO, Condition, ResolvedRequest

VISUAL_CONDITION_TIMESTEP = 0.999
"""Pictures and clips are conditions with a little noise: an augmentation of the training that the release keeps."""

AUDIO_CONDITION_TIMESTEP = 1.0

_VIDEO_CLOCK, _AUDIO_CLOCK, _VISUAL_CONDITION, _AUDIO_CONDITION = range(4)


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
    def condition(self) -> slice:
        return slice(self.num_text, self.num_text + self.num_condition)

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

        Text rows follow the video's clock. Conditions keep a timestep of their own, which noisier rows never pass.
        Equal timesteps share one entry (both streams start at 0).
        """
        clocks = {
            _VIDEO_CLOCK: video_timestep,
            _AUDIO_CLOCK: audio_timestep,
            _VISUAL_CONDITION: video_timestep.clamp(min=VISUAL_CONDITION_TIMESTEP),
            _AUDIO_CONDITION: audio_timestep.clamp(min=AUDIO_CONDITION_TIMESTEP),
        }
        conditions = self.modality[self.layout.condition]
        used = [_VIDEO_CLOCK, _AUDIO_CLOCK]
        used += [_VISUAL_CONDITION] if (conditions == VIDEO).any() else []
        used += [_AUDIO_CONDITION] if (conditions == AUDIO).any() else []
        timesteps, entries = torch.unique(torch.stack([clocks[clock] for clock in used]), return_inverse=True)
        entry = dict(zip(used, entries.tolist(), strict=True))
        index = torch.full((self.layout.num_rows,), entry[_VIDEO_CLOCK], dtype=torch.int32)
        index[self.layout.audio] = entry[_AUDIO_CLOCK]
        if self.layout.num_condition:
            index[self.layout.condition] = torch.where(
                conditions == AUDIO, entry.get(_AUDIO_CONDITION, 0), entry.get(_VISUAL_CONDITION, 0)
            ).int()
        return timesteps, index


def layout_of(request: ResolvedRequest, num_text: int, conditions: Sequence[Condition] = ()) -> PackedLayout:
    """How many rows of each part a request has."""
    rows_per_frame = (request.latent_height // PATCH) * (request.latent_width // PATCH)
    return PackedLayout(
        num_text=num_text,
        num_condition=sum(num_condition_rows(condition) for condition in conditions),
        num_audio=2 * request.num_audio_latents,
        num_video=request.num_latent_frames * rows_per_frame,
    )


def num_condition_rows(condition: Condition) -> int:
    """Rows that one condition adds: of both stereo channels, and of its frames."""
    num_rows = 0 if condition.audio is None else 2 * condition.audio.shape[2]
    if condition.video is not None:
        _, frames, height, width = condition.video.shape
        num_rows += frames * (height // PATCH) * (width // PATCH)
    return num_rows


def pack(request: ResolvedRequest, text_modality: Tensor, conditions: Sequence[Condition] = ()) -> PackedSequence:
    """The sequence of a request. text_modality: (L,) int32, 1 text, 0 rows of a vision block.

    conditions: keyframes, then references in the order of their time. References move the clock on before the video
    begins; a keyframe stands at its own time of the video.
    """
    num_text = len(text_modality)
    target = spatial_axes(request.latent_height, request.latent_width)
    cursor = float(num_text)
    references = []
    for condition in conditions:
        if condition.kind != "keyframe":
            positions, span = _reference_positions(condition, cursor, target[1])
            references.append(positions)
            cursor += span
    keyframes = [
        video_positions(np.array([cursor + _keyframe_time(condition, request)]), *target)
        for condition in conditions
        if condition.kind == "keyframe"
    ]
    positions = np.concatenate(
        [
            text_positions(num_text),
            *keyframes,
            *references,
            audio_positions(cursor, request.num_audio_latents, target[1]),
            video_positions(cursor + latent_times(request.num_latent_frames), *target),
        ]
    )
    layout = layout_of(request, num_text, conditions)
    modality = torch.empty(layout.num_rows, dtype=torch.int32)
    modality[:num_text] = text_modality
    if conditions:
        modality[layout.condition] = torch.cat([_condition_modality(condition) for condition in conditions])
    modality[layout.audio] = AUDIO
    modality[layout.video] = VIDEO
    return PackedSequence(layout=layout, modality=modality, position_ids=torch.from_numpy(positions).float())


def _keyframe_time(condition: Condition, request: ResolvedRequest) -> float:
    assert condition.frame is not None, "a keyframe stands at a frame"
    return keyframe_time(condition.frame, request.num_frames, request.num_latent_frames)


def _reference_positions(condition: Condition, cursor: float, target_w: np.ndarray) -> tuple[np.ndarray, float]:
    """Rows of one reference, sound before picture, and how far it moves the clock.

    Sound alone lies at the ends of the target's w axis, a soundtrack at those of its own picture.
    """
    num_audio = 0 if condition.audio is None else condition.audio.shape[2]
    if condition.video is None:
        return audio_positions(cursor, num_audio, target_w), float(num_audio)
    _, frames, height, width = condition.video.shape
    grid_h, grid_w = spatial_axes(height, width)
    if condition.kind == "image":
        return video_positions(np.array([cursor]), grid_h, grid_w), 1.0
    picture = video_positions(cursor + latent_times(frames), grid_h, grid_w)
    sound = audio_positions(cursor, num_audio, grid_w)
    return np.concatenate([sound, picture]), max(float(num_audio), clip_span(frames))


def _condition_modality(condition: Condition) -> Tensor:
    num_audio = 0 if condition.audio is None else 2 * condition.audio.shape[2]
    modality = torch.full((num_condition_rows(condition),), VIDEO, dtype=torch.int32)
    modality[:num_audio] = AUDIO
    return modality


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
