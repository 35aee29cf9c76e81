"""Rotary tables over (t, h, w) and the timestep sinusoid."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

MAX_PERIOD = 10000.0


class RotaryFrequencies(nn.Module):
    """Holds ``inv_freq`` (rope_inv_freq_len,) float32, shared by the three axes."""

    inv_freq: Tensor

    def __init__(self, num_frequencies: int):
        super().__init__()
        self.register_buffer("inv_freq", torch.empty(num_frequencies, dtype=torch.float32))

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """position_ids (S, 3) float32 -> cos, sin (S, R / 2) in ``dtype``: all of t, then h, then w."""
        angles = (position_ids[:, :, None] * self.inv_freq).flatten(1)  # (S, 3, R / 6) -> (S, R / 2)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def timestep_sinusoid(timesteps: Tensor, dim: int) -> Tensor:
    """timesteps (M,) float32 in [0, 1], unscaled -> (M, dim) float32, cosines first."""
    half = dim // 2
    exponent = -math.log(MAX_PERIOD) * torch.arange(half, dtype=torch.float32, device=timesteps.device) / half
    angles = timesteps[:, None] * exponent.exp()[None]
    return torch.cat([angles.cos(), angles.sin()], dim=-1)
