"""fp8_scaled: W = weight * weight_scale, a float8 weight with one scale, or one a row.

ComfyUI's ``comfy/utils.py`` (``convert_old_quants``) has the older names ``scale_weight`` and ``scale_input`` of the
scales, and ``comfy/ops.py`` the products. ``input_scale`` is the static scale of an FP8 product's rows; here rows get
their own, so it is not read. ``full_precision_matrix_mult`` asks for a product that is not in FP8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from comfyui_h3.h3core.checkpoint.quantized.linear import FLOATS, Parts, QuantizedLinear, column, scalar_or_rows
from comfyui_h3.kernels.quantize_fp8 import QuantizedRows

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Scaled(QuantizedLinear):
    """weight (N, K) float8; weight_scale: one, or N. ``is_e4m3``: it can stay as it is in an FP8 linear."""

    KIND = "fp8_scaled"

    is_e4m3: bool
    full_precision: bool

    @classmethod
    def of(cls, parts: Parts, *, dtypes: tuple[torch.dtype, ...], full_precision: bool) -> Fp8Scaled:
        """dtypes: of the weight. Raises CheckpointError for tensors of other roles, dtypes or shapes."""
        parts.check_roles(needed=("weight", "weight_scale"), optional=("input_scale", "comfy_quant", "bias"))
        shape = parts.matrix("weight", dtypes)
        parts.check("weight_scale", FLOATS, *scalar_or_rows(shape[0]))
        return cls(
            name=parts.name,
            shape=shape,
            keys=parts.read("weight", "weight_scale"),
            is_e4m3=parts.entries["weight"].dtype == torch.float8_e4m3fn,
            full_precision=full_precision,
        )

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors["weight"].float() * column(tensors["weight_scale"])

    def fp8_rows(self, tensors: Mapping[str, Tensor]) -> QuantizedRows | None:
        if not self.is_e4m3:
            return None
        scales = column(tensors["weight_scale"]).flatten().expand(self.shape[0]).contiguous()
        return QuantizedRows(values=tensors["weight"], scales=scales)
