"""Pixels as 8-bit values, rounded: truncation would darken a picture by half a step on average."""

from __future__ import annotations

import torch
from torch import Tensor

from comfyui_h3.h3core.errors import RequestError

CHUNK = 16  # frames of a host's float clip that are rounded at a time: 200 MB of scratch at 1344x768


def to_uint8(pixels: Tensor) -> Tensor:
    """Floats in [0, 1], overwritten -> uint8, halves to even. float32 first: half types would move values by one."""
    return pixels.float().mul_(255).round_().to(torch.uint8)


def images_to_uint8(images: Tensor) -> Tensor:
    """A host's (F, H, W, C) floats -> (F, H, W, 3) uint8, clipped; one channel becomes three, alpha goes.

    Raises RequestError for images that are not finite: the codec would turn them into arbitrary colours.
    """
    if images.shape[-1] == 1:
        images = images.expand(-1, -1, -1, 3)
    pixels = torch.empty((*images.shape[:3], 3), dtype=torch.uint8)
    for start in range(0, len(images), CHUNK):
        part = images[start : start + CHUNK, ..., :3].to("cpu", torch.float32)
        if not torch.isfinite(part).all():
            raise RequestError(f"the video holds NaN or Inf in its frames {start} to {start + len(part) - 1}")
        pixels[start : start + len(part)] = to_uint8(part.clamp(0, 1))
    return pixels
