"""The data objects that pass between stages: Request, ResolvedRequest, Conditioning, Latents, Frames, Audio, Mp4.

All are plain CPU data: a host can cache them, they survive a lost device, and a job re-queued after an error starts at
the stage that failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from torch import Tensor

from comfyui_h3.h3core.timing import Timings

VIDEO, TEXT, AUDIO = 0, 1, 2
"""Modality of a row of the packed sequence: which third of a block's modulation table it reads."""

Progress = Callable[[int, int], None]
"""Called with (done, total), first with done = 0. What it raises ends the stage and reaches the caller: cancelling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked. Length is ``num_frames``, or ``duration_s`` which is rounded up to the next legal count."""

    prompt: str
    width: int = 1344
    height: int = 768
    num_frames: int | None = None
    duration_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRequest:
    """What will run: integers only, so that two ranks can compare theirs with ``==``.

    ``num_frames`` is 17k + 5 at 24 fps; latents are (num_latent_frames, height / 16, width / 16) for video and
    ``num_audio_latents`` at 40 per second for each of the two channels.
    """

    width: int
    height: int
    num_frames: int
    num_latent_frames: int
    num_audio_latents: int

    @property
    def latent_height(self) -> int:
        return self.height // 16

    @property
    def latent_width(self) -> int:
        return self.width // 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Conditioning:
    """The prompt, encoded, and the request it was encoded for.

    text: (L, text_dim), the encoder's dtype. modality: (L,) int32, 0 video (rows of a vision block), 1 text.
    """

    request: ResolvedRequest
    text: Tensor
    modality: Tensor
    timings: Timings = field(default_factory=Timings)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Latents:
    """Denoised latents in normalised space, float32: video (24, T, H/16, W/16), audio (2, 32, A)."""

    request: ResolvedRequest
    video: Tensor
    audio: Tensor
    timings: Timings = field(default_factory=Timings)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frames:
    """Decoded picture. pixels: (F, H, W, 3) uint8 RGB; fps: frames per second."""

    pixels: Tensor
    fps: Fraction = Fraction(24)
    timings: Timings = field(default_factory=Timings)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Audio:
    """Decoded sound. samples: (channels, N) float32, nominally in [-1, 1]; sample_rate in Hz."""

    samples: Tensor
    sample_rate: int = 32000
    timings: Timings = field(default_factory=Timings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mp4:
    """A finished file; durations of its streams in seconds, ``audio_duration_s`` 0.0 for a silent one."""

    path: Path
    video_duration_s: float
    audio_duration_s: float
    timings: Timings = field(default_factory=Timings)
