"""Times of clips: the exact numbers that were meant by floats, and windows in seconds."""

from __future__ import annotations

import math
from fractions import Fraction
from numbers import Real

from comfyui_h3.h3core.errors import RequestError

MAX_SECONDS_DENOMINATOR = 1_000_000


def exact_seconds(value: float | Fraction) -> Fraction:
    """The number that was meant: 1/10 for the float nearest to it, which lies above, past a frame at that time."""
    return exact(value, MAX_SECONDS_DENOMINATOR)


def exact(value: float | Fraction, max_denominator: int) -> Fraction:
    """The nearest fraction with a denominator up to ``max_denominator``."""
    fraction = value if isinstance(value, Fraction) else Fraction(float(value))  # NumPy's numbers come as floats, too
    return fraction.limit_denominator(max_denominator)


def is_number(value: object) -> bool:
    """Whether a value is a real number that a float can hold: not NaN, no infinity, no text, no bool."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:  # an integer
        return False


def window(start_s: float, duration_s: float | None) -> tuple[Fraction, Fraction | None]:
    """Both in exact seconds. Raises RequestError for impossible ones."""
    if not (is_number(start_s) and start_s >= 0):
        raise RequestError(f"a start at {start_s!r} s is not possible; use 0 or more seconds")
    if duration_s is not None and not (is_number(duration_s) and duration_s > 0):
        raise RequestError(f"a duration of {duration_s!r} s is not possible; use a positive number of seconds")
    return exact_seconds(start_s), None if duration_s is None else exact_seconds(duration_s)


def past_the_end(name: str, start_s: float, duration_s: float) -> RequestError:
    """Of a start where the clip ``name``, of ``duration_s`` seconds, has no more frames."""
    return RequestError(
        f"a start at {start_s:g} s is past the last frame of {name}, which is {duration_s:.3g} s long; choose an "
        "earlier one"
    )
