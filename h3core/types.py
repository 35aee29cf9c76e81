"""The data objects that pass between stages: Request, EncodedMedia, Conditioning, Latents, Frames, Audio, Mp4.

All are plain CPU data: a host can cache them, they survive a lost device, and a job re-queued after an error starts at
the stage that failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Literal

from torch import Tensor

from comfyui_h3.h3core.timing import Timings

VIDEO, TEXT, AUDIO = 0, 1, 2
"""Modality of a row of the packed sequence: which third of a block's modulation table it reads."""

Progress = Callable[[int, int], None]
"""Called with (done, total), first with done = 0. What it raises ends the stage and reaches the caller: cancelling."""


Task = Literal["t2va", "fl2va", "ref2va"]
"""Text alone; keyframes the video passes through; references it takes from. The first two share their weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked. Length is ``num_frames`` or ``duration_s``, rounded up to the next legal count.

    strict: what would only be noticed, as a length the model was not trained on, is refused.
    """

    prompt: str
    width: int = 1344
    height: int = 768
    num_frames: int | None = None
    duration_s: float | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRequest:
    """What will run: no tensors, so that two ranks can compare theirs with ``==``.

    ``num_frames`` is 17k + 5 at 24 fps; latents are (num_latent_frames, height / 16, width / 16) for video and
    ``num_audio_latents`` at 40 per second for each of the two channels.
    """

    width: int
    height: int
    num_frames: int
    num_latent_frames: int
    num_audio_latents: int
    task: Task = "t2va"

    @property
    def latent_height(self) -> int:
        return self.height // 16

    @property
    def latent_width(self) -> int:
        return self.width // 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Condition:
    """One medium as the DiT reads it: extra rows of the packed sequence, which are never denoised.

    Latents are normalised, float32, on the CPU. video: (24, T, h, w), T = 1 for a picture; None for sound alone.
    audio: (2, 32, A); None without sound. frame: of the video, where a keyframe stands.
    """

    kind: Literal["keyframe", "image", "video", "audio"]
    video: Tensor | None = None
    audio: Tensor | None = None
    frame: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedMedium:
    """One medium for both readers: latents for the DiT, pixels for the text encoder.

    view: (m, H, W, 3) uint8, a picture's one frame or the frames of a video at 2 per second; None for sound alone.
    """

    condition: Condition
    view: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedMedia:
    """All media of one request, keyframes in the order of time, then references in the order they were given.

    notices: what is unusual about them, one sentence each.
    """

    request: ResolvedRequest
    media: tuple[EncodedMedium, ...]
    notices: tuple[str, ...] = ()
    timings: Timings = field(default_factory=Timings)

    @property
    def task(self) -> Task:
        return self.request.task

    @property
    def presented(self) -> tuple[EncodedMedium, ...]:
        """What the text encoder sees: the references; without any, the keyframes."""
        references = tuple(medium for medium in self.media if medium.condition.kind != "keyframe")
        return references or self.media

    @property
    def labels(self) -> tuple[tuple[str, ...], ...]:
        """What a prompt calls each medium of ``presented``, as "Picture 1". A soundtrack has a label of its own.

        It comes before that of its clip, so the last label of a medium is always its own.
        """
        counts = {"Picture": 0, "Video": 0, "Audio": 0}

        def label(kind: str) -> str:
            counts[kind] += 1
            return f"{kind} {counts[kind]}"

        found = []
        for condition in (medium.condition for medium in self.presented):
            names = [] if condition.audio is None else [label("Audio")]
            if condition.kind != "audio":
                names.append(label("Video" if condition.kind == "video" else "Picture"))
            found.append(tuple(names))
        return tuple(found)

    @property
    def num_pictures(self) -> int:
        """Media that a prompt calls ``<Picture N>``."""
        return self._count("Picture")

    @property
    def num_videos(self) -> int:
        """Media that a prompt calls ``<Video N>``."""
        return self._count("Video")

    @property
    def num_audios(self) -> int:
        """Sounds that a prompt calls ``<Audio N>``; the soundtracks of clips count."""
        return self._count("Audio")

    def _count(self, kind: str) -> int:
        return sum(label.startswith(kind) for labels in self.labels for label in labels)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Conditioning:
    """The prompt and the media, encoded, and the request they were encoded for.

    text: (L, text_dim), the encoder's dtype. modality: (L,) int32, 0 video (rows of a vision block), 1 text.
    notices: what is unusual about the request, one sentence each.
    """

    request: ResolvedRequest
    text: Tensor
    modality: Tensor
    conditions: tuple[Condition, ...] = ()
    notices: tuple[str, ...] = ()
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
