"""Which media a request may have: kinds, numbers, places, and the limits of the hosted service."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media.canvas import (
    FPS,
    FRAME_STEP,
    LATENT_STARTS,
    canvas_for_ratio,
    check_ratio,
)
from comfyui_h3.h3core.media.clips import ClipInfo
from comfyui_h3.h3core.media.conform import check_reference_frames, check_short_edge
from comfyui_h3.h3core.media.pictures import REFERENCE_SIZES, check_cover
from comfyui_h3.h3core.media.references import (
    FITS,
    LAST_FRAME,
    Keyframe,
    MediaRequest,
    Reference,
    ReferenceAudio,
    ReferenceImage,
    ReferenceVideo,
    reference_names,
)
from comfyui_h3.h3core.media.sound import check_audio
from comfyui_h3.h3core.request import reported, resolve_size
from comfyui_h3.h3core.types import Audio, ResolvedRequest, Task

MAX_IMAGES, MAX_VIDEOS, MAX_AUDIOS, MAX_MEDIA = 9, 3, 3, 12

# Of the hosted service; the weights know no such limits. Seconds, pixels, width over height, bytes.
HOSTED_CLIP_S = (2.0, 15.0)
HOSTED_TOTAL_S = 15.01
HOSTED_SIDE = (256, 5760)
HOSTED_RATIO = (0.4, 2.5)
HOSTED_VIDEO_BYTES = 50 << 20
HOSTED_FPS = (23.97, 60.0)


def resolve_media(request: MediaRequest) -> tuple[MediaRequest, ResolvedRequest, tuple[str, ...]]:
    """The request with its keyframes in the order of time and their places resolved; the sizes it is for; notices.

    Raises RequestError for what cannot run, and with ``request.strict`` for what is unusual.
    """
    if not request.keyframes and not request.references:
        raise RequestError("no media are given; connect a keyframe or a reference, or disconnect media from the prompt")
    if request.fit not in FITS:
        raise RequestError(f"fit={request.fit!r} does not exist; use one of {', '.join(FITS)}")
    check_references(request.references)
    task: Task = "ref2va" if request.references else "fl2va"
    resolved, notices = resolve_size(request.width, request.height, request.num_frames, request.duration_s, task)
    keyframes = resolve_keyframes(request.keyframes, resolved.num_frames)
    if len(keyframes) + len(request.references) > MAX_MEDIA:
        raise RequestError(
            f"{len(keyframes) + len(request.references)} media are given, keyframes counted; use {MAX_MEDIA} or fewer"
        )
    for number, keyframe in enumerate(keyframes):
        if number or request.fit == "cover":
            height, width = keyframe.pixels.shape[:2]
            what = f"the keyframe at frame {keyframe.frame}"
            check_cover(width, height, resolved.width, resolved.height, what=what)
    request = replace(request, keyframes=keyframes)
    for name, reference in zip(reference_names(request.references), request.references, strict=True):
        _check_content(reference, name, resolved.num_frames / FPS)
    notices += [notice for medium in (*keyframes, *request.references) for notice in medium.notices]
    notices += [*_keyframe_notices(request, resolved), *_reference_notices(request)]
    return request, resolved, reported(notices, request.strict)


def check_references(references: tuple[object, ...], *, complete: bool = True) -> None:
    """Raises RequestError for too many references of a kind, or for sound alone.

    Up to 9 pictures, 3 videos and 3 sounds, 12 together. complete: False while more may follow: sound may then be
    alone.
    """
    limits = ((ReferenceImage, "pictures", MAX_IMAGES), (ReferenceVideo, "videos", MAX_VIDEOS))
    for kind, name, most in (*limits, (ReferenceAudio, "sounds", MAX_AUDIOS)):
        count = sum(isinstance(reference, kind) for reference in references)
        if count > most:
            raise RequestError(f"{count} reference {name} are given, H3 takes {most}; remove {count - most}")
    if len(references) > MAX_MEDIA:
        raise RequestError(
            f"{len(references)} references are given, H3 takes {MAX_MEDIA}; remove {len(references) - MAX_MEDIA}"
        )
    if complete and references and all(isinstance(reference, ReferenceAudio) for reference in references):
        raise RequestError("a reference sound is given alone; add a reference picture or video, H3 needs one beside it")


def used_part(reference: ReferenceVideo) -> ClipInfo:
    """The clip from ``start_s`` on. Raises RequestError when it ends before that, or cannot be read.

    Cheap to ask again: a clip keeps what it found.
    """
    return (reference.clip.trimmed(reference.start_s) if reference.start_s != 0 else reference.clip).info


def largest_clip_bytes(request: MediaRequest, resolved: ResolvedRequest) -> int:
    """Memory of the longest reference video once it is read, as 8-bit frames on its canvas."""
    sizes = [0]
    for reference in request.references:
        if isinstance(reference, ReferenceVideo):
            info = used_part(reference)
            width, height = canvas_for_ratio(info.width, info.height, reference.short_edge)
            sizes.append(min(resolved.num_frames, math.ceil(info.duration_s * FPS)) * width * height * 3)
    return max(sizes)


def found_in_clips(request: MediaRequest) -> list[str]:
    """What is unusual about the reference videos and showed when they were read."""
    clips = [reference.clip for reference in request.references if isinstance(reference, ReferenceVideo)]
    return [notice for clip in clips for notice in clip.notices]


def _check_content(reference: Reference, name: str, seconds: float) -> None:
    """Raises RequestError for what can be told to be impossible before a clip is decoded."""
    if isinstance(reference, ReferenceImage):
        check_ratio(reference.pixels.shape[1], reference.pixels.shape[0], name)
        if reference.size not in REFERENCE_SIZES:
            raise RequestError(
                f"size={reference.size!r} of {name} does not exist; use one of {', '.join(REFERENCE_SIZES)}"
            )
    elif isinstance(reference, ReferenceAudio):
        check_audio(reference.audio, seconds, what=name)
    else:
        check_short_edge(reference.short_edge, name)
        info = used_part(reference)
        check_ratio(info.width, info.height, name)
        check_reference_frames(round(info.duration_s * FPS) + 1)  # as it is stated; reading it tells for certain
        if isinstance(reference.soundtrack, Audio):
            check_audio(reference.soundtrack, seconds, what=f"the sound of {name}")


def resolve_keyframes(keyframes: tuple[Keyframe, ...], num_frames: int) -> tuple[Keyframe, ...]:
    """Keyframes in the order of time, their places as frame numbers.

    Raises RequestError for a place outside the video, for two at one place, and for one where no latent frame begins.
    """
    placed: dict[int, Keyframe] = {}
    for keyframe in keyframes:
        frame = num_frames - 1 if keyframe.frame == LAST_FRAME else keyframe.frame
        check_keyframe_place(frame, num_frames)
        if frame in placed:
            raise RequestError(f"two keyframes are given for frame {frame}; keep one of them")
        placed[frame] = replace(keyframe, frame=frame)
    return tuple(placed[frame] for frame in sorted(placed))


def check_keyframe_place(frame: int, num_frames: int) -> None:
    """Raises RequestError unless ``frame`` is the last one of the video or the first one of a latent frame."""
    if not isinstance(frame, int) or isinstance(frame, bool) or not 0 <= frame < num_frames:
        raise RequestError(
            f"keyframe at frame {frame!r} of a video of {num_frames} frames; "
            f"use 0 to {num_frames - 1}, or -1 for the last"
        )
    if frame != num_frames - 1 and frame % FRAME_STEP not in LATENT_STARTS:
        starts = [number for number in range(num_frames) if number % FRAME_STEP in LATENT_STARTS]
        near = [max(start for start in starts if start < frame), *[start for start in starts if start > frame][:1]]
        raise RequestError(
            f"keyframe at frame {frame}, where no latent frame begins; use {' or '.join(map(str, near))} "
            "(17k + 0, 1, 5, 9 or 13), or -1 for the last"
        )


def _keyframe_notices(request: MediaRequest, resolved: ResolvedRequest) -> Iterator[str]:
    places = {keyframe.frame for keyframe in request.keyframes}
    if places - {0, resolved.num_frames - 1}:
        yield "keyframes between the first and the last frame are outside what H3 was trained on"
    if request.fit == "release" and request.keyframes:
        height, width = request.keyframes[0].pixels.shape[:2]
        stretch = (width / height) / (resolved.width / resolved.height)
        if not 0.95 < stretch < 1.05:
            yield (
                f"the keyframe at frame {request.keyframes[0].frame} is {width}x{height} and is stretched to "
                f"{resolved.width}x{resolved.height}, as the release does; fit=cover crops it instead"
            )


def _reference_notices(request: MediaRequest) -> Iterator[str]:
    videos_s = sounds_s = 0.0
    for name, reference in zip(reference_names(request.references), request.references, strict=True):
        if isinstance(reference, ReferenceImage):
            height, width = reference.pixels.shape[:2]
            yield from _side_notices(name, width, height)
        elif isinstance(reference, ReferenceVideo):
            info = used_part(reference)
            videos_s += info.duration_s
            yield from _side_notices(name, info.width, info.height)
            yield from _length_notices(name, info.duration_s)
            if info.num_bytes is not None and info.num_bytes > HOSTED_VIDEO_BYTES:
                yield f"{name} is a file of {info.num_bytes / 2**20:.0f} MiB; the hosted service takes 50"
            if not HOSTED_FPS[0] <= float(info.fps) <= HOSTED_FPS[1]:
                yield f"{name} has {float(info.fps):.3g} frames a second; the hosted service takes 23.976 to 60"
        else:
            seconds = reference.audio.samples.shape[-1] / max(reference.audio.sample_rate, 1)
            sounds_s += seconds
            yield from _length_notices(name, seconds)
    for word, total in (("videos", videos_s), ("sounds", sounds_s)):
        if total > HOSTED_TOTAL_S:
            yield f"the reference {word} are {total:.1f} s together; the hosted service takes 15"


def _side_notices(name: str, width: int, height: int) -> Iterator[str]:
    low, high = HOSTED_SIDE
    if min(width, height) < low or max(width, height) > high:
        yield f"{name} is {width}x{height}; the hosted service takes sides of {low} to {high} pixels"
    if not HOSTED_RATIO[0] <= width / height <= HOSTED_RATIO[1]:
        yield f"{name} is {width}x{height}; the hosted service takes ratios of 2:5 to 5:2"


def _length_notices(name: str, seconds: float) -> Iterator[str]:
    low, high = HOSTED_CLIP_S
    if not low <= seconds <= high + 0.01:
        yield f"{name} is {seconds:.1f} s long; the hosted service takes {low:.0f} to {high:.0f} s"
