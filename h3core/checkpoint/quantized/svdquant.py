"""SVDQuant NVFP4 W4A4 as vLLM-Omni stores it: a product in four bits, and a bfloat16 product of low rank beside it.

y = wtscale * wcscales * (Q4(x / smooth_factor) @ W4.T) + (x @ proj_down) @ proj_up.T, W4 = e2m1 * wscales, a scale in
e4m3 for 16 inputs. An even k is in the lower four bits, ``wscales`` is (K/16, N), and nothing is in tiles. Sources:
vLLM-Omni, ``quantization/svdquant_config.py`` and ``tools/convert_nunchaku_to_svdquant.py``; SVDQuant,
arXiv:2411.05007. Files of Nunchaku have these names and shapes, too, but the order of its kernels; they have no
``quantization_config`` of this kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from comfyui_h3.h3core.checkpoint.quantized import e2m1
from comfyui_h3.h3core.checkpoint.quantized.linear import Parts, QuantizedLinear
from comfyui_h3.h3core.models.precision import exact_fp32

BLOCK = 16
E4M3_MAX = 448.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SvdQuant(QuantizedLinear):
    """qweight (N, K/2) int8; wscales (K/16, N) e4m3; wtscale (1,), wcscales (N,), smooth_factor (K,), proj_down (K, R)
    and proj_up (N, R) bfloat16. wtscale and wcscales are ones where they are absent."""

    KIND = "svdquant nvfp4"

    @classmethod
    def of(cls, parts: Parts) -> SvdQuant:
        """Raises CheckpointError for tensors of other roles, dtypes or shapes."""
        needed = ("qweight", "wscales", "smooth_factor", "proj_down", "proj_up")
        parts.check_roles(needed=needed, optional=("wtscale", "wcscales", "bias"))
        num_rows, num_bytes = parts.matrix("qweight", (torch.int8, torch.uint8))
        num_inputs = 2 * num_bytes
        parts.check_blocks(num_inputs, BLOCK)
        bfloat16 = (torch.bfloat16,)
        rank = parts.matrix("proj_down", bfloat16)[1]
        parts.check("wscales", (torch.float8_e4m3fn,), (num_inputs // BLOCK, num_rows))
        parts.check("proj_down", bfloat16, (num_inputs, rank))
        parts.check("proj_up", bfloat16, (num_rows, rank))
        parts.check("smooth_factor", bfloat16, (num_inputs,))
        parts.check("wtscale", bfloat16, (1,), ())
        parts.check("wcscales", bfloat16, (num_rows,))
        return cls(name=parts.name, shape=(num_rows, num_inputs), keys=parts.read(*needed, "wtscale", "wcscales"))

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The weight of both products together, whose rows stay in 16 bits: W4A16."""
        weight = self.base(tensors).div_(tensors["smooth_factor"].float())
        with exact_fp32():
            return weight.addmm_(tensors["proj_up"].float(), tensors["proj_down"].float().t())

    def base(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The weight in four bits with all its scales, (N, K) float32; exact, as it has 22 significant bits."""
        weight = e2m1.decode(tensors["qweight"], even_is_high=False).unflatten(1, (-1, BLOCK))
        weight = weight.mul_(tensors["wscales"].t().float()[..., None]).flatten(1)
        if "wtscale" in tensors:
            weight *= tensors["wtscale"].float()
        if "wcscales" in tensors:
            weight *= tensors["wcscales"].float()[:, None]
        return weight

    def multiply(self, x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """x (..., K) -> (..., N) float32, without the bias: the reference of W4A4, rows in four bits, too."""
        x = x.float()
        rows = quantize_rows(x / tensors["smooth_factor"].float())
        with exact_fp32():
            low_rank = (x @ tensors["proj_down"].float()) @ tensors["proj_up"].float().t()
            return rows @ self.base(tensors).t() + low_rank


def quantize_rows(x: Tensor) -> Tensor:
    """Float32 rows as NVFP4 holds them with a tensor scale of 1: each 16 nearest e2m1 times e4m3(max / 6)."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    scales = (blocks.abs().amax(-1, keepdim=True) / e2m1.MAX).clamp(max=E4M3_MAX)
    scales = scales.to(torch.float8_e4m3fn).float()
    codes = e2m1.nearest(blocks / torch.where(scales == 0, 1.0, scales))
    return (codes * scales).flatten(-2)
