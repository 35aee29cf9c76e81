"""Still pictures as H3 reads them: (H, W, 3) uint8 RGB, transparent parts on white, resized with PIL's LANCZOS.

Whatever had to be changed is told in notices, one sentence each and without a full stop, for a node to show.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media.canvas import SIDE_MULTIPLE, check_ratio
from comfyui_h3.h3core.media.frames import to_uint8

REFERENCE_SIZES = ("diffusers", "match", "max")
REFERENCE_SHORT_EDGE = 2048  # of the release, for reference images only
BACKGROUND = 1.0  # white: what pages and viewers put behind a transparent picture
MAX_COVERED_PIXELS = 100_000_000  # of the scaled picture, before it is cut: 0.3 GB, and as much in between
HALF_CODE = 0.5 / 255  # values this little outside [0, 1] still round to 0 or 255


def picture_from_images(images: Tensor, *, what: str = "the picture") -> tuple[Tensor, tuple[str, ...]]:
    """The first picture of a host's IMAGE, and what was changed in it.

    images: (B, H, W, C) or (H, W, C), floats in [0, 1] or uint8; C is 1 gray, 2 gray and alpha, 3 RGB, 4 RGBA. The
    result is (H, W, 3) uint8 on the CPU, a copy, rounded; alpha is put on white, values outside [0, 1] are clipped.

    Raises RequestError for another shape or dtype (integers other than uint8 do not tell which value is white), for an
    empty batch or size, and for NaN or Inf. what: how messages call the picture.
    """
    notices: list[str] = []
    if images.ndim not in (3, 4) or images.shape[-1] not in (1, 2, 3, 4):
        raise RequestError(
            f"{what} has the shape {tuple(images.shape)}; it must be (height, width, channels) or a batch of such, "
            "with 1 (gray), 2 (gray and alpha), 3 (RGB) or 4 (RGBA) channels"
        )
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise RequestError(f"{what} is of {images.dtype}; convert it to floats in 0..1, or to uint8 in 0..255")
    if 0 in images.shape:
        raise RequestError(f"{what} is empty, its shape is {tuple(images.shape)}; give at least one pixel")
    if images.ndim == 4:
        if len(images) > 1:
            notices.append(f"{what} is a batch of {len(images)}; only its first picture is used")
        images = images[0]
    if images.dtype == torch.uint8 and images.shape[-1] in (1, 3):
        pixels = torch.empty(*images.shape[:2], 3, dtype=torch.uint8)
        return pixels.copy_(images), tuple(notices)
    values = images.to("cpu", torch.float32, copy=True)  # (H, W, C)
    if images.dtype == torch.uint8:
        values /= 255
    if not torch.isfinite(values).all():
        raise RequestError(f"{what} holds NaN or Inf; look at the node that made it, and queue again")
    low, high = float(values.min()), float(values.max())
    if low < -HALF_CODE or high > 1 + HALF_CODE:
        notices.append(f"{what} has values from {low:.3g} to {high:.3g}; they are clipped to 0..1")
    values.clamp_(0, 1)
    if values.shape[-1] in (2, 4):
        alpha = values[..., -1:]
        values = values[..., :-1]
        if bool((alpha < 1 - HALF_CODE).any()):
            notices.append(f"{what} is partly transparent; it is put on white")
            values = torch.lerp(torch.full_like(values, BACKGROUND), values, alpha)
    return to_uint8(values).expand(-1, -1, 3).contiguous(), tuple(notices)


def resize(pixels: Tensor, width: int, height: int) -> Tensor:
    """(H, W, 3) uint8 -> (height, width, 3) by LANCZOS; the same tensor when it has that size."""
    if pixels.shape[:2] == (height, width):
        return pixels
    image = Image.fromarray(pixels.numpy()).resize((width, height), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(image))


def cover(pixels: Tensor, width: int, height: int) -> Tensor:
    """(H, W, 3) uint8 scaled to cover (height, width, 3) and cut at the centre; the same tensor when it has that size.

    The rounding is that of the release: the cut may be half a pixel off the centre, towards the top left. Raises
    RequestError as ``check_cover`` does.
    """
    old_height, old_width = pixels.shape[:2]
    check_cover(old_width, old_height, width, height)
    scaled_width, scaled_height = _covering(old_width, old_height, width, height)
    left, top = (scaled_width - width) // 2, (scaled_height - height) // 2
    scaled = resize(pixels, scaled_width, scaled_height)
    return scaled if scaled.shape[:2] == (height, width) else scaled[top : top + height, left : left + width].clone()


def check_cover(width: int, height: int, canvas_width: int, canvas_height: int, *, what: str = "the picture") -> None:
    """Raises RequestError for a picture so thin that, scaled to cover the canvas, it would pass 100 megapixels.

    Sizes in pixels. what: how messages call the picture.
    """
    scaled_width, scaled_height = _covering(width, height, canvas_width, canvas_height)
    if scaled_width * scaled_height > MAX_COVERED_PIXELS:
        raise RequestError(
            f"{what} is {width}x{height}; to cover {canvas_width}x{canvas_height} it would be scaled to "
            f"{scaled_width}x{scaled_height}, more than {MAX_COVERED_PIXELS // 10**6} megapixels; crop it to about the "
            "ratio of the video"
        )


def _covering(width: int, height: int, canvas_width: int, canvas_height: int) -> tuple[int, int]:
    """(width, height) of a picture that is scaled to cover a canvas."""
    scale = max(canvas_width / width, canvas_height / height)
    return max(canvas_width, round(width * scale)), max(canvas_height, round(height * scale))


def reference_size(width: int, height: int, mode: str, canvas_area: int) -> tuple[int, int]:
    """(width, height) at which a reference image is encoded: its own ratio, sides to the nearest 32 pixels.

    mode: "diffusers" brings the short side to 2048 pixels, up or down; "max" only down; "match" brings the area down to
    ``canvas_area`` pixels, that of the target. Raises RequestError for another mode or a ratio outside 1:4..4:1.
    """
    if mode not in REFERENCE_SIZES:
        raise RequestError(f"reference size {mode!r} does not exist; use one of {', '.join(REFERENCE_SIZES)}")
    check_ratio(width, height, "the reference image")
    to_short_edge = REFERENCE_SHORT_EDGE / min(width, height)
    if mode == "diffusers":
        scale = to_short_edge
    elif mode == "max":
        scale = min(1.0, to_short_edge)
    else:
        scale = min(1.0, math.sqrt(canvas_area / (width * height)))
    return _to_multiple(width * scale), _to_multiple(height * scale)


def _to_multiple(side: float) -> int:
    return max(SIDE_MULTIPLE, round(side / SIDE_MULTIPLE) * SIDE_MULTIPLE)
