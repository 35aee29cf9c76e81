"""Which media a request may have: kinds, numbers, places, and the limits of the hosted service."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media.canvas import FPS, check_ratio
from comfyui_h3.h3core.media.references import (
    LAST_FRAME,
    Keyframe,
    MediaRequest,
    Reference,
    ReferenceAudio,
    ReferenceImage,
    ReferenceVideo,
)
from comfyui_h3.h3core.media.sound import check_audio
from comfyui_h3.h3core.request import reported, resolve_size
from comfyui_h3.h3core.types import Audio, ResolvedRequest, Task

MAX_IMAGES, MAX_VIDEOS, MAX_AUDIOS, MAX_MEDIA = 9, 3, 3, 12
LATENT_STARTS = (0, 1, 5, 9, 13)  # of every 17 frames: where a latent frame begins

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
        raise RequestError("no media are given; connect a keyframe or a reference, or leave media of the prompt empty")
    check_references(request.references)
    task: Task = "ref2va" if request.references else "fl2va"
    resolved, notices = resolve_size(request.width, request.height, request.num_frames, request.duration_s, task)
    keyframes = resolve_keyframes(request.keyframes, resolved.num_frames)
    if len(keyframes) + len(request.references) > MAX_MEDIA:
        raise RequestError(
            f"{len(keyframes) + len(request.references)} media are given, keyframes counted; use {MAX_MEDIA} or fewer"
        )
    request = replace(request, keyframes=keyframes)
    for reference in request.references:
        _check_content(reference, resolved.num_frames / FPS)
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


def _check_content(reference: Reference, seconds: float) -> None:
    """Raises RequestError for what can be told to be impossible without reading a file."""
    if isinstance(reference, ReferenceImage):
        check_ratio(reference.pixels.shape[1], reference.pixels.shape[0], "the reference picture")
    elif isinstance(reference, ReferenceAudio):
        check_audio(reference.audio, seconds)
    else:
        info = reference.clip.info
        check_ratio(info.width, info.height, "the reference video")
        if isinstance(reference.soundtrack, Audio):
            check_audio(reference.soundtrack, seconds)


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
    if frame != num_frames - 1 and frame % 17 not in LATENT_STARTS:
        lower = max(start for start in LATENT_STARTS if start < frame % 17) + frame // 17 * 17
        upper = next(number for number in range(frame, frame + 17) if number % 17 in LATENT_STARTS)
        raise RequestError(
            f"keyframe at frame {frame}, where no latent frame begins; use {lower} or {upper} "
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
    videos_s = audios_s = 0.0
    counts = {"Picture": 0, "Video": 0, "Audio": 0}
    for reference in request.references:
        if isinstance(reference, ReferenceImage):
            counts["Picture"] += 1
            height, width = reference.pixels.shape[:2]
            yield from _side_notices(f"<Picture {counts['Picture']}>", width, height)
        elif isinstance(reference, ReferenceVideo):
            counts["Video"] += 1
            info = reference.clip.info
            name = f"<Video {counts['Video']}>"
            seconds = max(0.0, info.duration_s - reference.start_s)
            videos_s += seconds
            yield from _side_notices(name, info.width, info.height)
            yield from _length_notices(name, seconds)
            if info.num_bytes is not None and info.num_bytes > HOSTED_VIDEO_BYTES:
                yield f"{name} is a file of {info.num_bytes / 2**20:.0f} MiB; the hosted service takes 50"
            if not HOSTED_FPS[0] <= float(info.fps) <= HOSTED_FPS[1]:
                yield f"{name} has {float(info.fps):.3g} frames a second; the hosted service takes 23.976 to 60"
        else:
            counts["Audio"] += 1
            seconds = reference.audio.samples.shape[-1] / max(reference.audio.sample_rate, 1)
            audios_s += seconds
            yield from _length_notices(f"reference sound {counts['Audio']}", seconds)
    for name, total in (("videos", videos_s), ("sounds", audios_s)):
        if total > HOSTED_TOTAL_S:
            yield f"the reference {name} are {total:.1f} s together; the hosted service takes 15"


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
