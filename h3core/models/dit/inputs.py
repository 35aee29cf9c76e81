"""The operations in front of a linear, in the form that gives what this linear reads.

A linear in 8 bits reads rows that are quantised already, where the device multiplies in 8 bits: the operation before it
then writes half the bytes, and no pass of its own is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from comfyui_h3.h3core.models.fp8_linear import Fp8Linear
from comfyui_h3.kernels.gate_residual_norm import gate_residual_norm
from comfyui_h3.kernels.gate_residual_norm_fp8 import gate_residual_norm_fp8
from comfyui_h3.kernels.norm_modulate import norm_modulate
from comfyui_h3.kernels.norm_modulate_fp8 import norm_modulate_fp8
from comfyui_h3.kernels.swiglu import swiglu
from comfyui_h3.kernels.swiglu_fp8 import swiglu_fp8


@dataclass(frozen=True, slots=True, kw_only=True)
class InputOps:
    """Operations of the same meaning and arguments; rows they give are (S, K), bfloat16 or ``QuantizedRows``."""

    norm_modulate: Callable[..., Any]
    gate_residual_norm: Callable[..., Any]
    swiglu: Callable[..., Any]


PLAIN = InputOps(norm_modulate=norm_modulate, gate_residual_norm=gate_residual_norm, swiglu=swiglu)
FP8 = InputOps(norm_modulate=norm_modulate_fp8, gate_residual_norm=gate_residual_norm_fp8, swiglu=swiglu_fp8)


def ops_before(linear: nn.Module) -> InputOps:
    """The operations whose rows ``linear`` reads as they are."""
    return FP8 if isinstance(linear, Fp8Linear) and linear.multiplies_fp8 else PLAIN
