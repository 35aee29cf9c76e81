"""e2m1: four bits, a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6; two of them in a byte.

Source: OCP Microscaling Formats (MX) v1.0, section 5.3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the lower three bits; the fourth is the sign
MAX = MAGNITUDES[-1]


def decode(packed: Tensor, *, even_is_high: bool) -> Tensor:
    """Bytes (N, K/2) -> values (N, K) float32; ``even_is_high``: whether an even k is in the upper four bits."""
    values = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], device=packed.device)
    byte = torch.arange(256, device=packed.device)
    low, high = values[byte & 15], values[byte >> 4]
    pairs = torch.stack([high, low] if even_is_high else [low, high], dim=-1)  # (256, 2)
    return F.embedding(packed.view(torch.uint8).int(), pairs).flatten(-2)


def nearest(x: Tensor) -> Tensor:
    """The values nearest to float32 ``x``; halfway between two, the one whose code is even; beyond 6, 6."""
    ends = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=x.device)
    # An end belongs to the value below it; every second one, to the one above.
    ends[1::2] = torch.nextafter(ends[1::2], ends.new_zeros(()))
    magnitudes = torch.tensor(MAGNITUDES, device=x.device)
    return magnitudes[torch.bucketize(x.abs(), ends)].copysign(x)
