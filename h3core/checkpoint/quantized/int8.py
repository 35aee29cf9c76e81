"""int8_tensorwise: W = weight * weight_scale, an int8 weight with one scale, or one a row; and its ConvRot form.

With ``convrot`` the weight was rotated before it was rounded: W = (weight * weight_scale) R in each group of
``convrot_groupsize`` input channels. R is the regular Hadamard matrix H4 x ... x H4 / sqrt(group), x the Kronecker
product, H4[i, j] = -1 where i + j = 3 and 1 elsewhere; it is symmetric, and R R = I. Sources: comfy-kitchen,
``tensor/int8_utils.py`` and ``backends/eager/quantization.py``; ConvRot, arXiv:2512.03673.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comfyui_h3.h3core.checkpoint.quantized.linear import FLOATS, Parts, QuantizedLinear, column, scalar_or_rows
from comfyui_h3.h3core.errors import CheckpointError

GROUPS = (4, 16, 64, 256)  # powers of 4: their roots are powers of 2
H4 = ((1, 1, 1, -1), (1, 1, -1, 1), (1, -1, 1, 1), (-1, 1, 1, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8(QuantizedLinear):
    """weight (N, K) int8; weight_scale: one, or N. ``group``: channels of a rotation, None where there is none."""

    KIND = "int8_tensorwise"

    group: int | None

    @classmethod
    def of(cls, parts: Parts, options: Mapping[str, Any]) -> Int8:
        """Raises CheckpointError for tensors of other roles, dtypes or shapes, and for an impossible group."""
        parts.check_roles(needed=("weight", "weight_scale"), optional=("input_scale", "comfy_quant", "bias"))
        shape = parts.matrix("weight", (torch.int8,))
        parts.check("weight_scale", FLOATS, *scalar_or_rows(shape[0]))
        group = None
        if options.get("convrot", False):
            group = options.get("convrot_groupsize", GROUPS[-1])
            if type(group) is not int or group not in GROUPS:
                raise CheckpointError(
                    f"{parts.source}: {parts.name} has convrot_groupsize={group!r}; "
                    f"the rotation has one of {', '.join(map(str, GROUPS))} channels"
                )
            parts.check_blocks(shape[1], group)
        return cls(name=parts.name, shape=shape, keys=parts.read("weight", "weight_scale"), group=group)

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        weight, scale = tensors["weight"].float(), column(tensors["weight_scale"])
        if self.group is None:
            return weight * scale
        # Sums of 256 bytes are whole numbers below 2**24, exact in float32 in any order, and the root is a power of
        # two: W has the one rounding of the product, on every device.
        rotated = weight.unflatten(1, (-1, self.group)) @ _hadamard(self.group, weight.device)
        return rotated.flatten(1) * (scale / self.group**0.5)


def _hadamard(size: int, device: torch.device) -> Tensor:
    """(size, size) float32 of 1 and -1; divided by the root of ``size`` it is R."""
    h4 = torch.tensor(H4, dtype=torch.float32, device=device)
    matrix = h4
    while len(matrix) < size:
        matrix = torch.kron(matrix, h4)
    return matrix
