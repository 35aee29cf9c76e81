"""A clip at 24 frames per second on its own canvas, and how many of its frames the video VAE reads."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing
from fractions import Fraction

import torch
from torch import Tensor

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media.canvas import (
    FPS,
    FRAME_STEP,
    MAX_SIDE,
    MIN_FRAMES,
    SHORT_EDGE,
    SIDE_MULTIPLE,
    canvas_for_ratio,
    check_ratio,
)
from comfyui_h3.h3core.media.clips import Clip
from comfyui_h3.h3core.media.pictures import resize
from comfyui_h3.h3core.media.seconds import exact_seconds, is_number
from comfyui_h3.h3core.types import Progress

MIN_REFERENCE_FRAMES = 22
WASTE = 1.1  # of a clip that is shorter than it states: more memory in vain is given back
HALF = Fraction(1, 2)
HEARTBEAT_S = 0.25  # between calls of on_frame while no frame is done


def conform(
    clip: Clip,
    *,
    max_frames: int,
    start_s: float = 0.0,
    short_edge: float = SHORT_EDGE,
    on_frame: Progress | None = None,
) -> Tensor:
    """(n, H, W, 3) uint8, n <= max_frames: the clip at 24 frames per second on the canvas of its own display ratio.

    A frame that starts at t seconds fills the slots from floor(t * 24 + 1/2) to that of the next frame, the last one to
    that of its end; decoding stops when max_frames are full. start_s: seconds into the clip. short_edge: of the canvas.

    on_frame: called with (frames done, frames expected), with 0 done also while frames before ``start_s`` are decoded;
    what it raises closes the clip and passes through.

    Raises RequestError for a ratio outside 1:4..4:1, a clip that does not decode, and one too short for a single frame.
    """
    if max_frames < 1:
        raise RequestError(f"{max_frames} frames of a reference video are not possible; use 1 or more")
    check_short_edge(short_edge)
    if start_s != 0:
        clip = clip.trimmed(start_s)
    report = on_frame or _ignore
    info = clip.info
    check_ratio(info.width, info.height, "the reference video")
    expected = min(max_frames, max(1, _slot(exact_seconds(info.duration_s))))
    conformed = torch.empty(0)
    num_done = width = height = 0
    report(0, expected)
    with closing(clip.frames(_heartbeat(report, expected))) as frames:
        for frame in frames:
            if num_done == 0:  # a clip may begin where its file has another size than at first
                check_ratio(*frame.size, "the reference video")
                width, height = canvas_for_ratio(*frame.size, short_edge)
                conformed = torch.empty(expected, height, width, 3, dtype=torch.uint8)
            end = min(_slot(frame.end), max_frames)
            if end > len(conformed):  # the file is longer than it states
                conformed = _grown(conformed, min(max_frames, max(end, 2 * len(conformed))))
            if end > num_done:
                conformed[num_done:end] = resize(torch.from_numpy(frame.pixels), width, height)
                num_done = end
            report(num_done, max(expected, num_done))
            if num_done == max_frames:
                break
    if num_done == 0:
        raise RequestError("the reference video is shorter than one frame at 24 per second; use a longer clip")
    conformed = conformed[:num_done]
    return conformed.clone() if conformed.untyped_storage().nbytes() > WASTE * conformed.nbytes else conformed


def check_short_edge(short_edge: float, what: str = "the reference video") -> None:
    """Raises RequestError unless the canvas of a clip can have this short side, in pixels."""
    if not (is_number(short_edge) and SIDE_MULTIPLE <= short_edge <= MAX_SIDE):
        raise RequestError(
            f"short_edge={short_edge!r} of {what} is not possible; use {SIDE_MULTIPLE} to {MAX_SIDE} pixels"
        )


def check_reference_frames(num_frames: int) -> None:
    """Raises RequestError when a conformed clip has fewer frames than the video VAE needs of a reference."""
    if num_frames < MIN_REFERENCE_FRAMES:
        raise RequestError(
            f"a reference video needs at least {MIN_REFERENCE_FRAMES} frames at {FPS} fps "
            f"({MIN_REFERENCE_FRAMES / FPS:.2f} s), this one has {num_frames} ({num_frames / FPS:.2f} s); "
            "use a longer clip, or one of its frames as a reference image"
        )


def vae_frames(num_frames: int) -> int:
    """How many of the frames of a conformed clip the video VAE encodes: the largest 17k + 5, k >= 1."""
    return max(1, (num_frames - MIN_FRAMES) // FRAME_STEP) * FRAME_STEP + MIN_FRAMES


def _ignore(done: int, total: int) -> None:
    """Progress that nobody asked for."""


def _heartbeat(report: Progress, expected: int) -> Callable[[], None]:
    """A callback that reports no frame done, a few times a second at most."""
    last = time.monotonic()

    def beat() -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= HEARTBEAT_S:
            last = now
            report(0, expected)

    return beat


def _slot(seconds: Fraction) -> int:
    return math.floor(seconds * FPS + HALF)


def _grown(frames: Tensor, num_frames: int) -> Tensor:
    grown = frames.new_empty(num_frames, *frames.shape[1:])
    grown[: len(frames)] = frames
    return grown
