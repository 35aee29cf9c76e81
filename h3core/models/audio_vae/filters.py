"""The alias-free activation of the vocoder: twice the rate, SnakeBeta, and back. Its formula is that of the kernel."""

import math

import torch
from torch import Tensor, nn

from comfyui_h3.kernels.snake_beta import NUM_TAPS, snake_beta


def kaiser_sinc_filter() -> Tensor:
    """The (1, 1, 12) low-pass of cutoff 1/4 and half width 0.3, sum 1, fp32; a checkpoint holds the same values."""
    attenuation = 2.285 * (NUM_TAPS // 2 - 1) * math.pi * (4 * 0.3) + 7.95
    window = torch.kaiser_window(NUM_TAPS, periodic=False, beta=0.1102 * (attenuation - 8.7))
    time = torch.arange(NUM_TAPS, dtype=torch.float32) - (NUM_TAPS / 2 - 0.5)
    taps = 0.5 * window * torch.sinc(0.5 * time)
    return (taps / taps.sum()).view(1, 1, NUM_TAPS)


class Taps(nn.Module):
    """A filter, under the name the checkpoint has."""

    filter: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filter", kaiser_sinc_filter())


class Downsample(nn.Module):
    """Its filter is one level deeper, as the checkpoint's names have it."""

    def __init__(self) -> None:
        super().__init__()
        self.lowpass = Taps()


class SnakeBeta(nn.Module):
    """The parameters of x + sin(alpha x)^2 / beta per channel; both are stored as logarithms, (C,)."""

    def __init__(self, channels: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))


class AliasFreeSnakeBeta(nn.Module):
    """SnakeBeta at twice the rate, so that its harmonics do not fold back; (B, C, n) -> (B, C, n)."""

    def __init__(self, channels: int):
        super().__init__()
        self.upsample = Taps()
        self.act = SnakeBeta(channels)
        self.downsample = Downsample()

    def forward(self, x: Tensor) -> Tensor:
        act, up, down = self.act, self.upsample.filter, self.downsample.lowpass.filter
        return snake_beta(x, act.alpha, act.beta, up, down)
