"""What the tests of the convolution's kernels share: inputs, and the same functions in float64."""

import torch
from torch.nn import functional as F


def channels_last(x):
    """(B, C, T, H, W) -> (B * T, H, W, C)."""
    return x.permute(0, 2, 3, 4, 1).flatten(0, 1).contiguous()


def clips(x, clip):
    """(B * T, H, W, C) -> (B, C, T, H, W)."""
    return x.unflatten(0, (-1, clip)).permute(0, 4, 1, 2, 3)


def causal_conv(x, weight, bias):
    """The convolution of the encoder, in the dtype of its operands; x (B, C, T, H, W)."""
    x = F.pad(F.pad(x, (1, 1, 1, 1, 0, 0), mode="reflect"), (0, 0, 0, 0, 2, 0))
    return F.conv3d(x, weight, bias)


def downsampling_conv(x, weight, bias, time_stride):
    x = F.pad(F.pad(x, (0, 1, 0, 1, 0, 0), mode="reflect"), (0, 0, 0, 0, 2, 0))
    return F.conv3d(x, weight, bias, stride=(time_stride, 2, 2))


def make_conv(num_in, num_out, device, generator):
    """A weight that keeps the size of what it gets, and a bias."""
    weight = torch.randn(num_out, num_in, 3, 3, 3, device=device, generator=generator) * (27 * num_in) ** -0.5
    return weight, torch.randn(num_out, device=device, generator=generator)


def normed(x):
    """silu(group_norm(x)) of every frame of x (B, C, T, H, W), in float64."""
    frames = x.double().transpose(1, 2)
    y = F.group_norm(frames.flatten(0, 1), 32, eps=1e-6)
    return F.silu(y).unflatten(0, frames.shape[:2]).transpose(1, 2)
