"""mxfp8 of ComfyUI files: W = weight * 2**(weight_scale - 127), an e4m3 weight with a power of two for 32 inputs.

The powers are e8m0 bytes, 255 is NaN, in tiles (``block_scales``). Sources: OCP Microscaling Formats (MX) v1.0,
section 5.4.1; comfy-kitchen, ``backends/eager/quantization.py`` (``dequantize_mxfp8``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from comfyui_h3.h3core.checkpoint.quantized import block_scales
from comfyui_h3.h3core.checkpoint.quantized.linear import Parts, QuantizedLinear

BLOCK = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp8(QuantizedLinear):
    """weight (N, K) e4m3; weight_scale in tiles, e8m0 or uint8."""

    KIND = "mxfp8"

    @classmethod
    def of(cls, parts: Parts) -> Mxfp8:
        """Raises CheckpointError for tensors of other roles, dtypes or shapes."""
        parts.check_roles(needed=("weight", "weight_scale"), optional=("input_scale", "comfy_quant", "bias"))
        shape = num_rows, num_inputs = parts.matrix("weight", (torch.float8_e4m3fn,))
        parts.check_blocks(num_inputs, BLOCK)
        stored = block_scales.padded(num_rows, num_inputs // BLOCK)
        parts.check("weight_scale", (torch.float8_e8m0fnu, torch.uint8), stored)
        return cls(name=parts.name, shape=shape, keys=parts.read("weight", "weight_scale"))

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        num_rows, num_inputs = self.shape
        codes = block_scales.row_major(tensors["weight_scale"], num_rows, num_inputs // BLOCK)
        weight = tensors["weight"].float().unflatten(1, (-1, BLOCK))
        return weight.mul_(_powers(codes)[..., None]).flatten(1)


def _powers(codes: Tensor) -> Tensor:
    """e8m0 bytes -> float32, by its bits: the code is the biased exponent, that of 2**-127 is subnormal."""
    bits = codes.int() << 23
    bits = torch.where(codes == 0, 1 << 22, bits)
    return torch.where(codes == 255, 0x7FC00000, bits).view(torch.float32)
