"""Convolutions stored as length and direction, as the checkpoint has them, until ``fold_weight_norm``.

Not ``torch.nn.utils.parametrizations``: there a module and its deep copy share one class, and folding the one breaks
the other.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfyui_h3.kernels.conv1d import conv_transpose1d


class LengthAndDirection(nn.Module):
    """Weight w = g * v / |v|, the norm over all dims but the first; original0 is g, original1 is v."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.original0 = nn.Parameter(torch.norm_except_dim(weight.detach(), 2, 0))
        self.original1 = nn.Parameter(weight.detach())

    def forward(self) -> Tensor:
        return torch._weight_norm(self.original1, self.original0, 0)  # its roundings are those of the released model


def _split_weight(conv: nn.Module) -> None:
    weight = conv.weight
    assert isinstance(weight, nn.Parameter)
    del conv.weight
    conv.parametrizations = nn.ModuleDict({"weight": LengthAndDirection(weight)})


def _is_split(conv: nn.Module) -> bool:
    return "parametrizations" in conv._modules


def weight_of(conv: Any) -> Tensor:
    """The weight of a convolution, folded or not."""
    return conv.parametrizations["weight"]() if _is_split(conv) else conv.weight


class WeightNormConv1d(nn.Conv1d):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _split_weight(self)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(x, weight_of(self), self.bias, self.stride, self.padding, self.dilation)


class WeightNormConvTranspose1d(nn.ConvTranspose1d):
    """(B, C, n) -> (B, C', stride * n). The first dim of its weight, which has a length each, is the input channel."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int):
        super().__init__(in_channels, out_channels, kernel, stride=stride, padding=(kernel - stride) // 2)
        _split_weight(self)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        assert self.bias is not None
        return conv_transpose1d(x, weight_of(self), self.bias, self.stride[0])


def fold_weight_norm(module: nn.Module) -> None:
    """Replace length and direction of every weight in ``module`` by the weight itself, once; done twice, it stays so.

    In names: ``X.parametrizations.weight.original0`` and ``original1`` become ``X.weight``. Works on ``meta`` too: the
    module then has the names of a checkpoint that was stored folded.
    """
    with torch.no_grad():
        for child in module.modules():
            if isinstance(child, (WeightNormConv1d, WeightNormConvTranspose1d)) and _is_split(child):
                weight = weight_of(child)
                del child.parametrizations
                child.weight = nn.Parameter(weight, requires_grad=False)
