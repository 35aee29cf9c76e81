"""Inputs that several nodes share: the size and length of the video, how keyframes fit it, and strictness."""

from typing import Any

from comfy_api.latest import io

from comfyui_h3.h3core.media.canvas import (
    FPS,
    FRAME_STEP,
    MAX_FRAMES,
    MAX_SIDE,
    MIN_FRAMES,
    SIDE_MULTIPLE,
    TRAINED_FRAMES,
)
from comfyui_h3.h3core.media.references import FITS
from comfyui_h3.h3core.request import DEFAULT_NUM_FRAMES
from comfyui_h3.nodes._compat import make

SIDE = f"pixels; a multiple of {SIDE_MULTIPLE} from {SIDE_MULTIPLE} to {MAX_SIDE}, at most 4:1"


def size_inputs() -> list[Any]:
    """width, height and frames of the video."""
    return [
        io.Int.Input(
            "width",
            default=1344,
            min=SIDE_MULTIPLE,
            max=MAX_SIDE,
            step=SIDE_MULTIPLE,
            tooltip=f"Width in {SIDE}. Trained up to the area of 1344 x 768. H3 Canvas gives it.",
        ),
        io.Int.Input(
            "height",
            default=768,
            min=SIDE_MULTIPLE,
            max=MAX_SIDE,
            step=SIDE_MULTIPLE,
            tooltip=f"Height in {SIDE}. Trained up to the area of 1344 x 768. H3 Canvas gives it.",
        ),
        frames_input(
            f"124 is 5.2 s, 243 is 10.1 s. Trained on {TRAINED_FRAMES[0]} to {TRAINED_FRAMES[-1]} (4 to 15 s). "
            "H3 Canvas gives it."
        ),
    ]


def frames_input(more: str) -> Any:
    """The length of the video. more: what the tooltip says behind its range."""
    return io.Int.Input(
        "frames",
        default=DEFAULT_NUM_FRAMES,
        min=MIN_FRAMES,
        max=MAX_FRAMES,
        step=FRAME_STEP,
        tooltip=f"Length in frames at {FPS} per second: 17k + 5 from {MIN_FRAMES} to {MAX_FRAMES}, others are rounded "
        f"up. {more}",
    )


def fit_input() -> Any:
    """How a keyframe of another ratio comes to the canvas."""
    return io.Combo.Input(
        "fit",
        options=list(FITS),
        default=FITS[0],
        tooltip="For keyframes of another ratio than the video. release: the first in time is stretched, the others "
        "are cropped. cover: all are cropped at the centre.",
    )


def strict_input() -> Any:
    """Optional, and the last of a node: saved graphs without it keep their meaning."""
    return make(
        io.Boolean.Input,
        "strict",
        default=False,
        optional=True,
        tooltip="Refuse what would only be noticed: lengths and sizes outside the training, media outside the limits "
        "of the hosted service, media that the prompt does not name.",
        advanced=True,
    )
