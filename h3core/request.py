"""From what was asked to what will run: every check of a request, before any weight is touched."""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Sequence

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media.canvas import (
    AREA_CAP,
    FPS,
    TRAINED_FRAMES,
    align_num_frames,
    check_canvas,
    check_num_frames,
    frames_for_duration,
    num_audio_latents,
    num_latent_frames,
)
from comfyui_h3.h3core.types import EncodedMedia, Request, ResolvedRequest, Task

log = logging.getLogger(__name__)

DEFAULT_NUM_FRAMES = 124
DEFAULT_SEED = 42  # the serving references' seed when a request has none
MAX_SEED = 2**63 - 1
MAX_SIGMA_POINTS = 1000
MAX_PROMPT_CHARACTERS = 100_000  # a bound before anything is read; tokens are counted against the encoder's own
LABEL = re.compile(r"<(Picture|Video|Audio) ([0-9]+)>")
HOSTED_PROMPT_CHARACTERS = 7000  # limit of the hosted service; the weights have none


def resolve(request: Request, media: EncodedMedia | None = None) -> tuple[ResolvedRequest, tuple[str, ...]]:
    """The sizes and the task a request will run with, and what is unusual about it, one sentence each.

    ``media`` are those the prompt is about; they were prepared for one size, which has to be the request's.
    Raises RequestError for what cannot run, and with ``request.strict`` for what is unusual.
    """
    check_prompt(request.prompt)
    task: Task = "t2va" if media is None else media.task
    resolved, notices = resolve_size(request.width, request.height, request.num_frames, request.duration_s, task)
    if media is not None and media.request != resolved:
        raise RequestError(
            f"the media were encoded for {size_text(media.request)}, the prompt asks for {size_text(resolved)}; "
            "give both the same width, height and frames (H3 Canvas feeds both)"
        )
    counts = (0, 0, 0) if media is None else (media.num_pictures, media.num_videos, media.num_audios)
    check_labels(request.prompt, *counts)
    if len(request.prompt) > HOSTED_PROMPT_CHARACTERS:
        notices.append(
            f"the prompt has {len(request.prompt)} characters; the hosted service takes {HOSTED_PROMPT_CHARACTERS}"
        )
    if media is not None:
        notices += [
            f"<{label}> is connected, but the prompt does not name it: H3 may not use it"
            for label in unnamed(request.prompt, media)
        ]
    return resolved, reported(notices, request.strict)


def resolve_size(
    width: int, height: int, num_frames: int | None, duration_s: float | None, task: Task
) -> tuple[ResolvedRequest, list[str]]:
    """What will run at this size and length, and what is unusual about them. Raises RequestError when nothing can."""
    check_canvas(width, height)
    if duration_s is not None and num_frames is not None:
        raise RequestError("both frames and duration are given; give one of them")
    notices = []
    if duration_s is not None:
        aligned = frames_for_duration(duration_s)
        check_num_frames(aligned)
    else:
        asked = DEFAULT_NUM_FRAMES if num_frames is None else num_frames
        check_num_frames(asked)
        aligned = align_num_frames(asked)
        if aligned != asked:
            notices.append(f"frames={asked} is not 17k + 5: rounded up to {aligned} ({aligned / FPS:.2f} s)")
    if aligned not in TRAINED_FRAMES:
        notices.append(
            f"frames={aligned} ({aligned / FPS:.2f} s) is outside the trained range of "
            f"{TRAINED_FRAMES.start} to {TRAINED_FRAMES.stop - 1} frames (4 to 15 s): quality is not known there"
        )
    if width * height > AREA_CAP:
        notices.append(f"{width}x{height} has more pixels than 1344x768, the largest canvas H3 was trained on")
    resolved = ResolvedRequest(
        width=width,
        height=height,
        num_frames=aligned,
        num_latent_frames=num_latent_frames(aligned),
        num_audio_latents=num_audio_latents(aligned),
        task=task,
    )
    return resolved, notices


def size_text(request: ResolvedRequest) -> str:
    """A size as messages name it."""
    return f"{request.width}x{request.height}, {request.num_frames} frames"


def reported(notices: Sequence[str], strict: bool) -> tuple[str, ...]:
    """The notices, each logged as a warning. Raises RequestError with all of them when the request is strict."""
    check_strict(notices, strict)
    for notice in notices:
        log.warning(notice)
    return tuple(notices)


def check_strict(notices: Sequence[str], strict: bool) -> None:
    """Raises RequestError with all notices, when there are any and the request is strict."""
    if strict and notices:
        raise RequestError("refused, as strict is set: " + "; ".join(notices))


def check_prompt(prompt: str) -> None:
    """Raises RequestError for a blank, broken or immense prompt.

    The text itself is passed on verbatim.
    """
    if not isinstance(prompt, str):
        raise RequestError(f"the prompt is {type(prompt).__name__}, not text; give one string")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"the prompt holds half a character at place {error.start}; paste it again") from error
    if not any(unicodedata.category(letter)[0] not in "CZ" for letter in prompt):
        raise RequestError("the prompt is empty; describe the video in at least one word")
    if len(prompt) > MAX_PROMPT_CHARACTERS:
        raise RequestError(
            f"the prompt has {len(prompt)} characters; use {MAX_PROMPT_CHARACTERS} or fewer (7,000 is usual)"
        )


def check_labels(prompt: str, num_pictures: int = 0, num_videos: int = 0, num_audios: int = 0) -> None:
    """Raises RequestError when the prompt names a medium that is not there."""
    there = {"Picture": num_pictures, "Video": num_videos, "Audio": num_audios}
    for label in LABEL.finditer(prompt):
        kind, number = label[1], int(label[2][:9])
        if label[2] != str(int(label[2])):
            raise RequestError(f"the prompt names {label[0]}, which H3 reads as other tokens; write <{kind} {number}>")
        if 1 <= number <= there[kind]:
            continue
        if not any(there.values()):
            raise RequestError(f"the prompt names {label[0]}, but no media are connected; remove it from the prompt")
        found = ", ".join(
            f"<{name} 1>" + (f" to <{name} {count}>" if count > 1 else "") for name, count in there.items() if count
        )
        raise RequestError(
            f"the prompt names {label[0]}, and what is connected is {found}; connect it, or remove it from the prompt"
        )


def unnamed(prompt: str, media: EncodedMedia) -> list[str]:
    """Labels of media that the prompt never names, of a clip its own: its sound need not be named.

    The sentence for first and last frame names them without brackets.
    """
    own = [labels[-1] for labels in media.labels]
    return [label for label in own if not re.search(rf"\b{label}\b", prompt)]


def check_seed(seed: int) -> None:
    """Raises RequestError when the seed is not an integer in 0..2**63 - 1."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed <= MAX_SEED:
        raise RequestError(f"seed={seed!r} is not in 0..{MAX_SEED}; use a whole number of that range")


def check_sigma_points(sigma_points: int) -> None:
    """Raises RequestError when there are fewer than two sigma points (one forward) or more than 1000."""
    if not isinstance(sigma_points, int) or isinstance(sigma_points, bool) or not 2 <= sigma_points <= MAX_SIGMA_POINTS:
        raise RequestError(
            f"sigma_points={sigma_points!r} is not in 2..{MAX_SIGMA_POINTS}; the release uses 50 (49 forwards)"
        )
