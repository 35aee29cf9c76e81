"""Noise of the targets and of visual conditions: the scheme of the serving references, drawn on the CPU.

So it is the same on every machine and every number of devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.sampling.packing import VISUAL_CONDITION_TIMESTEP, audio_from_rows
from comfyui_h3.h3core.types import Condition, ResolvedRequest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Noise:
    """Unit noise, float32 on the CPU. video: (24, T, H/16, W/16), audio: (2, 32, A), the initial state of both streams.

    conditions: of each condition that has a picture, in their order, in the shape of its latents.
    """

    video: Tensor
    audio: Tensor
    conditions: tuple[Tensor, ...] = ()

    @classmethod
    def draw(
        cls,
        request: ResolvedRequest,
        seed: int,
        *,
        video_channels: int,
        audio_channels: int,
        conditions: Sequence[Condition] = (),
    ) -> Noise:
        """Each stream and each condition has a generator of its own with the same seed; audio is drawn in rows."""
        visual = [condition.video for condition in conditions if condition.video is not None]
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
        # The references draw as many frames as the whole sequence has, and keep the first.
        num_frames = request.num_latent_frames + len(visual)
        drawn = tuple(_condition_noise(latents, num_frames, seed) for latents in visual)
        return cls(video=video[0], audio=audio_from_rows(audio_rows), conditions=drawn)

    def check(self, request: ResolvedRequest, conditions: Sequence[Condition] = ()) -> None:
        """Raises RequestError unless the sizes are those of the request and of its visual conditions."""
        latents = (request.num_latent_frames, request.latent_height, request.latent_width)
        visual = [tuple(condition.video.shape) for condition in conditions if condition.video is not None]
        for name, given, wanted in (
            ("video", tuple(self.video.shape[1:]), latents),
            ("audio", tuple(self.audio.shape[::2]), (2, request.num_audio_latents)),
            ("conditions", [tuple(noise.shape) for noise in self.conditions], visual),
        ):
            if given != wanted:
                raise RequestError(f"the noise of {name} has the sizes {given}, this request needs {wanted}")


def _condition_noise(latents: Tensor, num_frames: int, seed: int) -> Tensor:
    channels, frames, height, width = latents.shape
    noise = torch.randn(
        1, channels, max(num_frames, frames), height, width, generator=torch.Generator().manual_seed(seed)
    )
    return noise[0, :, :frames].clone()


def noised(latents: Tensor, noise: Tensor) -> Tensor:
    """The latents of a visual condition as the DiT reads them, float32: nearly clean, at their constant timestep."""
    timestep = torch.tensor(VISUAL_CONDITION_TIMESTEP, dtype=torch.float32)
    return timestep * latents + (1.0 - timestep) * noise
