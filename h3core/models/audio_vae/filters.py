"""The alias-free activation of the vocoder: twice the rate, SnakeBeta, and back.

With x of length n, clamped at its ends, and the 12 taps f, the module form below is

    u[2t]     = 2 * sum(x[t + j] * f[5 - 2j] for j in -3..2)
    u[2t + 1] = 2 * sum(x[t + j] * f[6 - 2j] for j in -2..3)
    v         = snake_beta(u)                                  2n samples
    y[t]      = sum(f[k] * v[2t + k - 5] for k in 0..11)       clamped on v, not on x
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUM_TAPS = 12


def kaiser_sinc_filter() -> Tensor:
    """The (1, 1, 12) low-pass of cutoff 1/4 and half width 0.3, sum 1, fp32; a checkpoint holds the same values."""
    attenuation = 2.285 * (NUM_TAPS // 2 - 1) * math.pi * (4 * 0.3) + 7.95
    window = torch.kaiser_window(NUM_TAPS, periodic=False, beta=0.1102 * (attenuation - 8.7))
    time = torch.arange(NUM_TAPS, dtype=torch.float32) - (NUM_TAPS / 2 - 0.5)
    taps = 0.5 * window * torch.sinc(0.5 * time)
    return (taps / taps.sum()).view(1, 1, NUM_TAPS)


class Upsample(nn.Module):
    """(B, C, n) -> (B, C, 2n)."""

    filter: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filter", kaiser_sinc_filter())

    def forward(self, x: Tensor) -> Tensor:
        channels = x.shape[1]
        x = F.pad(x, (5, 5), mode="replicate")
        x = 2 * F.conv_transpose1d(x, self.filter.expand(channels, -1, -1), stride=2, groups=channels)
        return x[..., 15:-15]


class LowPass(nn.Module):
    """(B, C, 2n) -> (B, C, n)."""

    filter: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filter", kaiser_sinc_filter())

    def forward(self, x: Tensor) -> Tensor:
        channels = x.shape[1]
        x = F.pad(x, (5, 6), mode="replicate")
        return F.conv1d(x, self.filter.expand(channels, -1, -1), stride=2, groups=channels)


class Downsample(nn.Module):
    """Holds the low-pass under the name the checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.lowpass = LowPass()

    def forward(self, x: Tensor) -> Tensor:
        return self.lowpass(x)


class SnakeBeta(nn.Module):
    """x + sin(alpha x)^2 / beta per channel; both are stored as logarithms, (C,)."""

    def __init__(self, channels: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        alpha, beta = self.alpha.exp()[:, None], self.beta.exp()[:, None]
        return x + (1.0 / (beta + 1e-9)) * torch.sin(x * alpha).pow(2)


class AliasFreeSnakeBeta(nn.Module):
    """SnakeBeta at twice the rate, so that its harmonics do not fold back; (B, C, n) -> (B, C, n)."""

    def __init__(self, channels: int):
        super().__init__()
        self.upsample = Upsample()
        self.act = SnakeBeta(channels)
        self.downsample = Downsample()

    def forward(self, x: Tensor) -> Tensor:
        return self.downsample(self.act(self.upsample(x)))
