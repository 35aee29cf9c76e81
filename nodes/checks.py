"""What a host is told about a request before it is queued: the engine's own checks, on the values that are known."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from comfyui_h3.h3core.errors import H3Error, RequestError
from comfyui_h3.h3core.media.canvas import MAX_SIDE, SIDE_MULTIPLE, align_side, check_canvas, check_num_frames
from comfyui_h3.h3core.media.references import FITS
from comfyui_h3.h3core.request import check_labels, check_prompt, check_seed, check_sigma_points
from comfyui_h3.h3core.types import EncodedMedia

T = TypeVar("T")

UNLINKED = object()
"""Default of a socket in ``validate_inputs``: the host gives None for a linked one and leaves out one that is not."""


def expect(value: object, kind: type[T], source: str) -> T:
    """``value``, when it is what a socket carries. Raises RequestError for text or numbers put in place of a link."""
    if isinstance(value, kind):
        return value
    raise RequestError(f"a {type(value).__name__} stands where the output of {source} belongs; connect that node")


def expect_chain(values: object, kind: type[T] | tuple[type[T], ...], source: str) -> tuple[T, ...]:
    """``values``, when they are the links of a chain of ``source`` nodes. Raises RequestError as ``expect``."""
    for value in expect(values, tuple, f"an {source} node"):
        if not isinstance(value, kind):
            raise RequestError(f"a {type(value).__name__} is in a chain of {source} nodes; connect them to each other")
    return values  # type: ignore[return-value]


def expect_media(media: object) -> EncodedMedia | None:
    """``media``, when it is what the socket carries, or nothing is connected. Raises RequestError as ``expect``."""
    return None if media is None else expect(media, EncodedMedia, "H3 Encode FL Media or H3 Encode Ref Media")


def check_choice(name: str, value: str | None, options: Sequence[str]) -> None:
    """Raises RequestError for a value that is not in the list; None is a linked input."""
    if value is not None and value not in options:
        raise RequestError(f"{name}={value!r} does not exist; use one of {', '.join(options)}")


def check_short_edge(short_edge: int | None) -> None:
    """Raises RequestError for a short side that no canvas has; None is a linked input."""
    if short_edge is not None and not SIDE_MULTIPLE <= short_edge <= MAX_SIDE:
        raise RequestError(f"short_edge={short_edge} is not possible; use {SIDE_MULTIPLE} to {MAX_SIDE} pixels")


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


def judge_media(width: int | None, height: int | None, frames: int | None, fit: str | None) -> bool | str:
    """The verdict on what media are encoded for; None is a linked input."""
    return verdict(*size_checks(width, height, frames), lambda: check_choice("fit", fit, FITS))


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
