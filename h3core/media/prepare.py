"""Media as the encoders want them: pictures on their canvas, clips at 24 frames a second, sound at 32 kHz.

One medium at a time: a clip of 15 seconds is a gigabyte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from comfyui_h3.h3core.media.canvas import FPS
from comfyui_h3.h3core.media.conform import check_reference_frames, conform, vae_frames
from comfyui_h3.h3core.media.pictures import cover, reference_size, resize
from comfyui_h3.h3core.media.references import (
    MediaRequest,
    Reference,
    ReferenceAudio,
    ReferenceImage,
    ReferenceVideo,
    reference_names,
)
from comfyui_h3.h3core.media.sound import is_too_short, reference_waveform
from comfyui_h3.h3core.types import Audio, Progress, ResolvedRequest

VIEW_STRIDE = 12
"""The text encoder sees a clip at 2 frames a second."""

Announce = Callable[[str], Progress]
"""Called with the name of the medium and what is done with it, gives the callback for that part of the work."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedMedium:
    """One medium. frames: (F, H, W, 3) uint8, F = 1 for a picture; samples: (2, L) float32 at 32 kHz."""

    name: str
    kind: Literal["keyframe", "image", "video", "audio"]
    frames: Tensor | None = None
    samples: Tensor | None = None
    frame: int | None = None

    @property
    def encoded_frames(self) -> Tensor | None:
        """What the video VAE reads: of a clip, as many frames as fill whole latent frames."""
        if self.frames is None or self.kind != "video":
            return self.frames
        return self.frames[: vae_frames(len(self.frames))]

    @property
    def view(self) -> Tensor | None:
        """What the text encoder sees: the picture, or two frames of each second of the clip. A copy."""
        if self.frames is None:
            return None
        # Else it would keep the whole clip, or change with a picture that is written to.
        return self.frames[::VIEW_STRIDE].clone()


def prepare(request: MediaRequest, resolved: ResolvedRequest, announce: Announce) -> Iterator[PreparedMedium]:
    """The media of a request in their order, each made when it is asked for.

    Raises RequestError for a medium that cannot be read, is too short, or longer than 4:1.
    """
    for number, keyframe in enumerate(request.keyframes):
        fit = resize if number == 0 and request.fit == "release" else cover
        yield PreparedMedium(
            name=f"keyframe {number + 1}",
            kind="keyframe",
            frames=fit(keyframe.pixels, resolved.width, resolved.height)[None],
            frame=keyframe.frame,
        )
    for name, reference in zip(reference_names(request.references), request.references, strict=True):
        yield _prepare_reference(reference, name, resolved, announce)


def _prepare_reference(
    reference: Reference, name: str, resolved: ResolvedRequest, announce: Announce
) -> PreparedMedium:
    seconds = resolved.num_frames / FPS  # nothing of a reference is used past the end of the video
    if isinstance(reference, ReferenceImage):
        height, width = reference.pixels.shape[:2]
        size = reference_size(width, height, reference.size, resolved.width * resolved.height)
        return PreparedMedium(name=name, kind="image", frames=resize(reference.pixels, *size)[None])
    if isinstance(reference, ReferenceAudio):
        samples = reference_waveform(reference.audio, seconds, what=name)
        return PreparedMedium(name=name, kind="audio", samples=samples)
    frames = conform(
        reference.clip,
        max_frames=resolved.num_frames,
        start_s=reference.start_s,
        short_edge=reference.short_edge,
        on_frame=announce(f"Reading {name}"),
    )
    check_reference_frames(len(frames))
    audio = _own_sound(reference, name, seconds) if reference.soundtrack == "own" else reference.soundtrack
    waveform = None if audio is None else reference_waveform(audio, seconds, what=f"the sound of {name}")
    return PreparedMedium(name=name, kind="video", frames=frames, samples=waveform)


def _own_sound(reference: ReferenceVideo, name: str, seconds: float) -> Audio | None:
    """The soundtrack beside the used part of the clip; None, with a notice, where it fills no latent."""
    audio = reference.clip.sound(seconds, start_s=reference.start_s)
    if audio is None or not is_too_short(audio.samples.shape[-1], audio.sample_rate):
        return audio
    reference.clip.notice_sound(
        f"the sound of {name} is shorter than 25 ms where its picture is used: it counts as none"
    )
    return None
