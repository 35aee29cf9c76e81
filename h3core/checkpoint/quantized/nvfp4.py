"""nvfp4 of ComfyUI files: W = e2m1 * weight_scale * weight_scale_2, a scale in e4m3 for 16 inputs, and one for all.

An even k is in the upper four bits; block scales are in tiles (``block_scales``), as e4m3 or its bytes. AWQ files
multiply the rows by ``pre_quant_scale`` (K,); the product with its columns is the same. Sources: ComfyUI,
``comfy/ops.py``; comfy-kitchen, ``backends/eager/quantization.py`` (``dequantize_nvfp4``) and ``float_utils.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from comfyui_h3.h3core.checkpoint.quantized import block_scales, e2m1
from comfyui_h3.h3core.checkpoint.quantized.linear import FLOATS, Parts, QuantizedLinear

BLOCK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvfp4(QuantizedLinear):
    """weight (N, K/2) uint8; weight_scale e4m3 or uint8 in tiles; weight_scale_2: one; maybe pre_quant_scale (K,)."""

    KIND = "nvfp4"

    @classmethod
    def of(cls, parts: Parts) -> Nvfp4:
        """Raises CheckpointError for tensors of other roles, dtypes or shapes."""
        parts.check_roles(
            needed=("weight", "weight_scale", "weight_scale_2"),
            optional=("input_scale", "pre_quant_scale", "comfy_quant", "bias"),
        )
        num_rows, num_bytes = parts.matrix("weight", (torch.uint8,))
        num_inputs = 2 * num_bytes
        parts.check_blocks(num_inputs, BLOCK)
        stored = block_scales.padded(num_rows, num_inputs // BLOCK)
        parts.check("weight_scale", (torch.float8_e4m3fn, torch.uint8), stored)
        parts.check("weight_scale_2", FLOATS, (), (1,))
        parts.check("pre_quant_scale", FLOATS, (num_inputs,))
        return cls(
            name=parts.name,
            shape=(num_rows, num_inputs),
            keys=parts.read("weight", "weight_scale", "weight_scale_2", "pre_quant_scale"),
        )

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        num_rows, num_inputs = self.shape
        scales = block_scales.row_major(tensors["weight_scale"], num_rows, num_inputs // BLOCK)
        weight = e2m1.decode(tensors["weight"], even_is_high=True).unflatten(1, (-1, BLOCK))
        weight *= scales.contiguous().view(torch.float8_e4m3fn).float()[..., None]  # exact: 6 significant bits
        weight = weight.flatten(1).mul_(tensors["weight_scale_2"].float())
        if "pre_quant_scale" in tensors:
            weight *= tensors["pre_quant_scale"].float()
        return weight
