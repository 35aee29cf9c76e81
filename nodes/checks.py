"""What a host is told about a request before it is queued: the engine's own checks, on the values that are known."""

from collections.abc import Callable, Iterator
from typing import TypeVar

from comfyui_h3.h3core.errors import H3Error, RequestError
from comfyui_h3.h3core.media.canvas import align_side, check_canvas, check_num_frames
from comfyui_h3.h3core.request import check_labels, check_prompt, check_seed, check_sigma_points

T = TypeVar("T")

UNLINKED = object()
"""Default of a socket in ``validate_inputs``: the host gives None for a linked one and leaves out one that is not."""


def expect(value: object, kind: type[T], source: str) -> T:
    """``value``, when it is what a socket carries. Raises RequestError for text or numbers put in place of a link."""
    if isinstance(value, kind):
        return value
    raise RequestError(f"a {type(value).__name__} stands where the output of {source} belongs; connect that node")


def verdict(*checks: Callable[[], object]) -> bool | str:
    """True, or the message of the first check that fails: the two answers that ``validate_inputs`` may give."""
    try:
        for check in checks:
            check()
    except H3Error as error:
        return str(error)
    return True


def judge_prompt(
    prompt: str | None, width: int | None, height: int | None, frames: int | None, *, has_media: bool
) -> bool | str:
    """The verdict on a prompt and its size. None is a linked input: nothing is known of it yet.

    What media there will be is not known either; only without any is a label in the prompt wrong for certain.
    """
    checks: list[Callable[[], object]] = []
    if prompt is not None:
        checks.append(lambda: check_prompt(prompt))
    if prompt is not None and not has_media:
        checks.append(lambda: check_labels(prompt))
    return verdict(*checks, *size_checks(width, height, frames))


def judge_size(width: int | None, height: int | None, frames: int | None) -> bool | str:
    """The verdict on a size and a length; None is a linked input."""
    return verdict(*size_checks(width, height, frames))


def size_checks(width: int | None, height: int | None, frames: int | None) -> Iterator[Callable[[], object]]:
    """The checks that what is known of a size allows."""
    if width is not None and height is not None:
        yield lambda: check_canvas(width, height)
    elif width is not None:  # the other side is not known: one that fits
        yield lambda: check_canvas(width, align_side(width))
    elif height is not None:
        yield lambda: check_canvas(align_side(height), height)
    if frames is not None:
        yield lambda: check_num_frames(frames)


def judge_sampling(seed: int | None, sigma_points: int | None) -> bool | str:
    """The verdict on the settings of a sampling; None is a linked input."""
    checks: list[Callable[[], object]] = []
    if seed is not None:
        checks.append(lambda: check_seed(seed))
    if sigma_points is not None:
        checks.append(lambda: check_sigma_points(sigma_points))
    return verdict(*checks)
