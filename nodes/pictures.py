"""The host's IMAGE as one picture."""

import torch
from torch import Tensor

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media.pictures import picture_from_images


def from_host(images: object, what: str) -> tuple[Tensor, tuple[str, ...]]:
    """The first picture of an IMAGE, (H, W, 3) uint8, and what was changed in it. ``what`` names it in messages.

    Raises RequestError for what is not a picture.
    """
    if not isinstance(images, torch.Tensor):
        raise RequestError(f"a {type(images).__name__} stands where IMAGE belongs; connect a node that gives IMAGE")
    return picture_from_images(images, what=what)
