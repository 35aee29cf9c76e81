"""Initial noise: the scheme of the serving references, drawn on the CPU, so it is the same on every machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from comfyui_h3.h3core.sampling.packing import audio_from_rows
from comfyui_h3.h3core.types import ResolvedRequest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Noise:
    """Initial state of both streams, float32 on the CPU: video (24, T, H/16, W/16), audio (2, 32, A)."""

    video: Tensor
    audio: Tensor

    @classmethod
    def draw(cls, request: ResolvedRequest, seed: int, *, video_channels: int, audio_channels: int) -> Noise:
        """Unit noise. Each stream has a generator of its own with the same seed; audio is drawn in row layout."""
        video = torch.randn(
            1,
            video_channels,
            request.num_latent_frames,
            request.latent_height,
            request.latent_width,
            generator=torch.Generator().manual_seed(seed),
        )
        audio_rows = torch.randn(
            2 * request.num_audio_latents, audio_channels, generator=torch.Generator().manual_seed(seed)
        )
        return cls(video=video[0], audio=audio_from_rows(audio_rows))
