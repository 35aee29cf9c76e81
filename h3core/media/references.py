"""What a user gives beside the prompt: keyframes, reference pictures, clips and sounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from comfyui_h3.h3core.media.canvas import SHORT_EDGE
from comfyui_h3.h3core.media.clips import Clip
from comfyui_h3.h3core.types import Audio

LAST_FRAME = -1
FITS = ("release", "cover")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Keyframe:
    """A picture the video passes through. pixels: (H, W, 3) uint8 of any size; frame: 0 the first, -1 the last.

    notices, here and below: what was changed in the medium to make it this, one sentence each.
    """

    pixels: Tensor
    frame: int = 0
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceImage:
    """A subject, style or scene. pixels: (H, W, 3) uint8.

    size: "diffusers" brings the short side to 2048 pixels, as the release does; "max" only shrinks to that; "match"
    only shrinks, to the area of the video.
    """

    pixels: Tensor
    size: Literal["diffusers", "max", "match"] = "diffusers"
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceVideo:
    """A motion, a camera or a clip to go on from, with its sound.

    soundtrack: "own" takes what the clip has, None leaves it silent, an Audio takes its place. start_s: seconds into
    the clip, for picture and own sound alike. short_edge: of the picture, in pixels; 768 is the release's, less costs
    less.
    """

    clip: Clip
    soundtrack: Audio | Literal["own"] | None = "own"
    start_s: float = 0.0
    short_edge: int = SHORT_EDGE
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceAudio:
    """A voice or a music."""

    audio: Audio
    notices: tuple[str, ...] = ()


Reference: TypeAlias = ReferenceImage | ReferenceVideo | ReferenceAudio


def reference_names(references: tuple[Reference, ...]) -> list[str]:
    """What messages call each reference: "reference picture 1", "reference video 1", "reference sound 1"."""
    counts = {"picture": 0, "video": 0, "sound": 0}
    names = []
    for reference in references:
        word = {ReferenceImage: "picture", ReferenceVideo: "video", ReferenceAudio: "sound"}[type(reference)]
        counts[word] += 1
        names.append(f"reference {word} {counts[word]}")
    return names


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MediaRequest:
    """The media of one request, and the size and length of the video they are for.

    fit: how keyframes of another ratio come to the canvas. "release" stretches the first in time and crops the others,
    "cover" crops all. Length and strict as in ``Request``.
    """

    width: int = 1344
    height: int = 768
    num_frames: int | None = None
    duration_s: float | None = None
    keyframes: tuple[Keyframe, ...] = ()
    references: tuple[Reference, ...] = ()
    fit: Literal["release", "cover"] = "release"
    strict: bool = False
