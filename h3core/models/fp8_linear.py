"""A linear in 8 bits: an e4m3 weight with one scale for each output channel, times e4m3 rows with one scale each.

GPUs with e4m3 multiply it almost twice as fast as bfloat16. Elsewhere the weight is made bfloat16 again for the time of
the product, and only its memory is saved.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfyui_h3.kernels.launch import compute_capability
from comfyui_h3.kernels.quantize_fp8 import E4M3_CAPABILITY, QuantizedRows, quantize_fp8

log = logging.getLogger(__name__)

TRIAL_SIZE = 32  # a matrix that every e4m3 product takes


class Fp8Linear(nn.Module):
    """``nn.Linear`` over bfloat16 rows, its weight in 8 bits.

    weight: (N, K) float8_e4m3fn; weight_scale: (N,) float32. ``quantize`` makes both of a weight, if the file does not
    hold them. ``weight_only``: rows stay in bfloat16 where they could be multiplied in 8 bits, too.
    """

    DERIVED = ("weight_scale",)  # tensors that no file has to hold
    weight_only = False

    def __init__(self, in_features: int, out_features: int, bias: bool):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        weight = torch.empty(out_features, in_features, dtype=torch.float8_e4m3fn)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("weight_scale", torch.empty(out_features, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=torch.bfloat16), requires_grad=False) if bias else None

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def quantize(self, weight: Tensor) -> None:
        """Takes over a weight (N, K), on its device. The row order must be final: each row has its scale."""
        rows = quantize_fp8(weight)
        self.weight = nn.Parameter(rows.values, requires_grad=False)
        self.weight_scale = rows.scales

    @property
    def multiplies_fp8(self) -> bool:
        """Whether the product runs in 8 bits where the weight is; if so, rows may come quantised."""
        return not self.weight_only and multiplies_fp8(self.weight.device)

    def forward(self, x: Tensor | QuantizedRows) -> Tensor:
        """x: (..., K) bfloat16, or rows (S, K) that are quantised already -> (..., N) bfloat16."""
        if isinstance(x, QuantizedRows):
            return self._multiply(x)
        if not self.multiplies_fp8:
            return F.linear(x, self.dequantized().to(x.dtype), self.bias)
        return self._multiply(quantize_fp8(x.flatten(0, -2))).unflatten(0, x.shape[:-1])

    def dequantized(self) -> Tensor:
        """The weight as the product sees it, (N, K) float32."""
        return self.weight.float() * self.weight_scale[:, None]

    def _multiply(self, rows: QuantizedRows) -> Tensor:
        if not multiplies_fp8(self.weight.device):  # the same sum in float32, for tests
            bias = None if self.bias is None else self.bias.float()
            return F.linear(rows.dequantize(), self.dequantized(), bias).bfloat16()
        out = torch._scaled_mm(
            rows.values,
            self.weight.t(),
            scale_a=rows.scales[:, None],
            scale_b=self.weight_scale[None],
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return out if self.bias is None else out + self.bias


def multiplies_fp8(device: torch.device) -> bool:
    """Whether matrix products of e4m3 with a scale for each row and column run on ``device``: tried once.

    GPUs from compute capability 8.9 on have the products; which PyTorch has them with such scales, for which of these
    GPUs, changed from release to release.
    """
    return device.type == "cuda" and torch.version.cuda is not None and _row_scales_work(device)


@functools.lru_cache
def _row_scales_work(device: torch.device) -> bool:
    if compute_capability(device) < E4M3_CAPABILITY:
        log.info("8-bit linears save memory only: the GPU has no e4m3, which takes compute capability 8.9")
        return False
    x = torch.eye(TRIAL_SIZE, device=device).to(torch.float8_e4m3fn)
    scales = torch.arange(1, TRIAL_SIZE + 1, device=device, dtype=torch.float32)
    try:
        out = torch._scaled_mm(
            x, x.t(), scale_a=scales[:, None], scale_b=scales[None], out_dtype=torch.bfloat16, use_fast_accum=True
        )
    except (RuntimeError, TypeError) as error:  # as PyTorch says that it has not got them
        log.warning("8-bit linears save memory only: this PyTorch has no such products on this GPU (%s)", error)
        return False
    if not torch.equal(out.float(), scales.square().diag().bfloat16().float()):
        log.warning("8-bit linears save memory only: this PyTorch's products of that kind are wrong on this GPU")
        return False
    return True
