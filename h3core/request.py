"""From what was asked to what will run: every check of a request, before any weight is touched."""

from __future__ import annotations

import logging
import re
import unicodedata

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media.canvas import (
    AREA_CAP,
    FPS,
    TRAINED_FRAMES,
    check_canvas,
    check_num_frames,
    frames_for_duration,
    num_audio_latents,
    num_latent_frames,
)
from comfyui_h3.h3core.types import Request, ResolvedRequest

log = logging.getLogger(__name__)

DEFAULT_NUM_FRAMES = 124
DEFAULT_SEED = 42  # the serving references' seed when a request has none
MAX_SEED = 2**63 - 1
MAX_SIGMA_POINTS = 1000
MAX_PROMPT_CHARACTERS = 100_000  # a bound before anything is read; tokens are counted against the encoder's own
REFERENCE = re.compile(r"<(Picture|Video|Audio) \d+>")
HOSTED_PROMPT_CHARACTERS = 7000  # limit of the hosted service; the weights have none


def resolve(request: Request) -> ResolvedRequest:
    """The sizes a text-to-video request will run at.

    Raises RequestError for what cannot run; logs a warning for what can, but lies outside what H3 was trained on.
    """
    check_prompt(request.prompt)
    check_labels(request.prompt)
    check_canvas(request.width, request.height)
    if request.duration_s is not None and request.num_frames is not None:
        raise RequestError("both frames and duration are given; give one of them")
    if request.duration_s is not None:
        num_frames = frames_for_duration(request.duration_s)
    else:
        num_frames = DEFAULT_NUM_FRAMES if request.num_frames is None else request.num_frames
    check_num_frames(num_frames)
    for warning in warnings(request, num_frames):
        log.warning(warning)
    return ResolvedRequest(
        width=request.width,
        height=request.height,
        num_frames=num_frames,
        num_latent_frames=num_latent_frames(num_frames),
        num_audio_latents=num_audio_latents(num_frames),
    )


def warnings(request: Request, num_frames: int) -> list[str]:
    """What is unusual about a legal request, one sentence each."""
    found = []
    if num_frames not in TRAINED_FRAMES:
        found.append(
            f"frames={num_frames} ({num_frames / FPS:.2f} s) is outside the trained range of "
            f"{TRAINED_FRAMES.start} to {TRAINED_FRAMES.stop - 1} frames (4 to 15 s): quality is not known there"
        )
    if request.width * request.height > AREA_CAP:
        found.append(
            f"{request.width}x{request.height} has more pixels than 1344x768, the largest canvas H3 was trained on"
        )
    if len(request.prompt) > HOSTED_PROMPT_CHARACTERS:
        found.append(
            f"the prompt has {len(request.prompt)} characters; the hosted service takes {HOSTED_PROMPT_CHARACTERS}"
        )
    return found


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


def check_labels(prompt: str) -> None:
    """Raises RequestError when the prompt of a text-to-video request names media."""
    label = REFERENCE.search(prompt)
    if label:
        raise RequestError(f"the prompt names {label[0]}, but no media are connected; remove it from the prompt")


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
