"""Sizes and lengths H3 can make: canvases in multiples of 32, frames 17k + 5 at 24 per second."""

from __future__ import annotations

import math

from comfyui_h3.h3core.errors import RequestError

FPS = 24
AUDIO_LATENTS_PER_SECOND = 40
SIDE_MULTIPLE = 32  # 16 pixels per latent, 2 latents per patch
MIN_FRAMES = 5
LATENT_SPANS = (1, 4, 4, 4, 4)  # pixel frames behind each latent frame, repeating
FRAME_STEP = sum(LATENT_SPANS)
LATENT_STARTS = tuple(sum(LATENT_SPANS[:i]) for i in range(5))  # of every 17 frames: where a latent frame begins
MAX_FRAMES = 3592  # 150 s, and 17k + 5: far past what the model was trained for, near what memory allows
MAX_SIDE = 4096
TRAINED_FRAMES = range(107, 363)  # 4 s to 15 s
AREA_CAP = 768 * 1344
SHORT_EDGE = 768
MAX_RATIO = 4


def canvas_for_ratio(width: float, height: float, short_edge: float = SHORT_EDGE) -> tuple[int, int]:
    """(width, height) of the canvas for a picture of the ratio ``width : height``, sides to the nearest 32 pixels.

    The short side is ``short_edge``, less where the area would pass that of 1344x768: the rule of the release, for the
    target and for each reference video. Raises RequestError for a ratio outside 1:4..4:1.
    """
    check_ratio(width, height)
    ratio = width / height
    nominal = (short_edge * ratio, float(short_edge)) if ratio >= 1 else (float(short_edge), short_edge / ratio)
    scale = min(1.0, math.sqrt(AREA_CAP / (nominal[0] * nominal[1])))
    canvas_width, canvas_height = (
        max(SIDE_MULTIPLE, round(side * scale / SIDE_MULTIPLE) * SIDE_MULTIPLE) for side in nominal
    )
    return canvas_width, canvas_height


def check_ratio(width: float, height: float, what: str = "the picture") -> None:
    """Raises RequestError when one side is longer than four times the other, or not positive."""
    if not (width > 0 and height > 0):
        raise RequestError(f"{what} is {width:g}x{height:g}; both sides must be positive")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise RequestError(
            f"{what} is {width:g}x{height:g}, longer than {MAX_RATIO}:1; crop it to a ratio from 1:{MAX_RATIO} to "
            f"{MAX_RATIO}:1"
        )


def check_canvas(width: int, height: int) -> None:
    """Raises RequestError when a side is not a positive multiple of 32, too large, or the ratio is outside 1:4..4:1."""
    for name, side in (("width", width), ("height", height)):
        if not isinstance(side, int) or isinstance(side, bool):
            raise RequestError(f"{name}={side!r} is not a whole number of pixels; use a multiple of {SIDE_MULTIPLE}")
        if side < SIDE_MULTIPLE or side % SIDE_MULTIPLE:
            lower = max(SIDE_MULTIPLE, side // SIDE_MULTIPLE * SIDE_MULTIPLE)
            raise RequestError(
                f"{name}={side} is not a multiple of {SIDE_MULTIPLE} pixels; use {lower}"
                + (f" or {lower + SIDE_MULTIPLE}" if side > SIDE_MULTIPLE else "")
            )
        if side > MAX_SIDE:
            raise RequestError(f"{name}={side} is more than {MAX_SIDE} pixels; use {MAX_SIDE} or less")
    if max(width, height) > MAX_RATIO * min(width, height):
        long_side, short_side = max(width, height), min(width, height)
        raise RequestError(
            f"width={width} height={height} is longer than 4:1; "
            f"make the long side {4 * short_side} or less, or the short side {align_side(long_side / 4)} or more"
        )


def align_side(side: float) -> int:
    """The smallest multiple of 32 that is at least ``side``."""
    return max(SIDE_MULTIPLE, math.ceil(side / SIDE_MULTIPLE) * SIDE_MULTIPLE)


def align_num_frames(num_frames: int) -> int:
    """The smallest legal frame count (17k + 5) that is at least ``num_frames``."""
    return max(MIN_FRAMES, num_frames + (MIN_FRAMES - num_frames) % FRAME_STEP)


def check_num_frames(num_frames: int) -> None:
    """Raises RequestError when ``num_frames`` is not in 5..3592. A count off the grid is rounded up by who uses it."""
    if not isinstance(num_frames, int) or isinstance(num_frames, bool):
        raise RequestError(f"frames={num_frames!r} is not a whole number; use 17k + 5, for example 124 (5.17 s)")
    if num_frames < MIN_FRAMES:
        raise RequestError(f"frames={num_frames} is too few; use {MIN_FRAMES} or more, in steps of 17 (5, 22, 39, ...)")
    if num_frames > MAX_FRAMES:
        raise RequestError(f"frames={num_frames} is too many; use {MAX_FRAMES} ({MAX_FRAMES / FPS:.1f} s) or less")


def frames_for_duration(duration_s: float) -> int:
    """Frames of a clip of ``duration_s`` seconds: rounded to 24 per second, then up to the next 17k + 5.

    Raises RequestError for a duration that is not finite, not positive or past the longest clip.
    """
    if isinstance(duration_s, bool) or not isinstance(duration_s, int | float) or not math.isfinite(duration_s):
        raise RequestError(f"duration={duration_s!r} is not a number of seconds; use 4 to 15")
    if duration_s <= 0:
        raise RequestError(f"duration={duration_s} s is not positive; use 4 to 15 seconds")
    if duration_s * FPS > MAX_FRAMES:
        raise RequestError(f"duration={duration_s} s is longer than {MAX_FRAMES / FPS:.0f} s; use 4 to 15 seconds")
    return align_num_frames(round(duration_s * FPS))


def num_latent_frames(num_frames: int) -> int:
    """Video latent frames of a legal frame count."""
    return 5 * (num_frames - 5) // 17 + 2


def num_audio_latents(num_frames: int) -> int:
    """Audio latents of each channel for a clip of ``num_frames``; halves round to even, as in the release."""
    return round(num_frames / FPS * AUDIO_LATENTS_PER_SECOND)
