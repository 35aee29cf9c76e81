"""The convolutional encoder on tensor cores: the arithmetic of ``VideoEncoder``, its products of float16 halves.

Activations are (F, H, W, C) float32, F the frames of all tiles of a batch: the order in which the kernels read them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfyui_h3.h3core.config import EncodePrecision
from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.models.video_vae.blocks import CausalConv3d, ConvEncoder, Downsample, FrameGroupNorm
from comfyui_h3.h3core.models.video_vae.config import VideoVAEConfig
from comfyui_h3.kernels.conv3d import conv3d
from comfyui_h3.kernels.conv3d_pairs import conv3d_pairs, pair_weight
from comfyui_h3.kernels.dispatch import current_backend, tensor_core_problem, use_triton
from comfyui_h3.kernels.group_norm_silu import group_norm_silu
from comfyui_h3.kernels.split_half import SplitWeight
from comfyui_h3.kernels.split_rows import pixel_rows, pixel_weight, strided_rows

# The first levels hold most of the activations: their tiles are encoded few at a time, and the rest all together.
WIDE_LEVELS = 2
WIDE_FRAMES = 17


def choose_planes(precision: EncodePrecision, exact: bool, config: VideoVAEConfig, device: torch.device) -> int | None:
    """How many float16 halves each operand has: 2 for "split", 1 for "half", None for float32.

    "auto" is float32 where ``exact`` is asked for, and else "split" where its kernels can run. Raises RequestError when
    they are insisted on and cannot.
    """
    if precision == "float32" or (precision == "auto" and exact):
        return None
    problem = tensor_core_problem(device) or _width_problem(config)
    if precision == "auto":
        if problem is not None and current_backend() == "triton":  # which would insist on what nobody asked for
            return None
        return 2 if use_triton("encode_split", device, problem) else None
    if problem is not None:
        raise RequestError(f"encode_precision={precision} cannot run: {problem}; use auto or float32")
    return 2 if precision == "split" else 1


def _width_problem(config: VideoVAEConfig) -> str | None:
    widths = [config.ch * mult for mult in (1, *config.ch_mult)]
    if any(width & (width - 1) for width in widths):
        return f"the widths {widths} are not all powers of two"
    return None


class SplitEncoder:
    """Encodes as ``quant_conv(encoder(x))`` does, with two halves of every operand (``planes=2``) or one."""

    def __init__(self, encoder: ConvEncoder, quant_conv: nn.Conv3d, planes: int):
        self._encoder = encoder
        self._quant_conv = quant_conv
        self._planes = planes
        self._weights: dict[nn.Module, SplitWeight] = {encoder.conv_in: pixel_weight(encoder.conv_in.weight, planes)}
        for module in encoder.modules():
            if isinstance(module, Downsample):
                self._weights[module] = SplitWeight.of(module.conv.weight, planes)
            elif isinstance(module, CausalConv3d) and module is not encoder.conv_in:
                self._weights[module] = pair_weight(module.weight, planes)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalised pixels (B, 3, T, H, W) fp32 -> moments (B, 48, T', H / 16, W / 16) fp32."""
        encoder, quant_conv = self._encoder, self._quant_conv
        wide = [self._wide_levels(part) for part in x.split(max(1, WIDE_FRAMES // x.shape[2]))]
        length = wide[0][1]
        y = torch.cat([part for part, _ in wide])
        del wide
        for level in encoder.down[WIDE_LEVELS:]:
            y, length = self._level(level, y, length)
        y = self._conv(encoder.norm_out, encoder.conv_out, y, length)
        y = F.linear(y, quant_conv.weight.flatten(1), quant_conv.bias)  # (B * T', H / 16, W / 16, 48)
        return y.unflatten(0, (-1, length)).permute(0, 4, 1, 2, 3)

    def _wide_levels(self, x: Tensor) -> tuple[Tensor, int]:
        """Normalised pixels -> the result of the first levels, and the frames that are left of a clip."""
        conv_in, clip = self._encoder.conv_in, x.shape[2]
        y = conv3d(pixel_rows(x, self._planes), self._weights[conv_in], _bias(conv_in), clip=clip)
        for level in self._encoder.down[:WIDE_LEVELS]:
            y, clip = self._level(level, y, clip)
        return y, clip

    def _level(self, level: Any, x: Tensor, clip: int) -> tuple[Tensor, int]:
        """level: a ``Level``. clip: frames of one clip in x; also given back, for the result."""
        for block in level.block:
            x = self._block(block, x, clip)
        down = level.downsample
        if down is None:
            return x, clip
        stride = down.conv.stride[0]
        rows = strided_rows(x, self._planes)
        return conv3d(rows, self._weights[down], down.conv.bias, clip=clip, time_stride=stride), (
            clip - 1
        ) // stride + 1

    def _block(self, block: Any, x: Tensor, clip: int) -> Tensor:
        """block: a ``ResBlock``. The result takes the memory of x where that is its shortcut."""
        y = self._conv(block.norm1, block.conv1, x, clip)
        if block.nin_shortcut is not None:
            x = F.linear(x, block.nin_shortcut.weight.flatten(1), block.nin_shortcut.bias)
        return self._conv(block.norm2, block.conv2, y, clip, residual=x)

    def _conv(
        self, norm: FrameGroupNorm, conv: CausalConv3d, x: Tensor, clip: int, residual: Tensor | None = None
    ) -> Tensor:
        rows = group_norm_silu(x, norm.weight, norm.bias, norm.num_groups, norm.eps, self._planes)
        return conv3d_pairs(rows, self._weights[conv], _bias(conv), clip=clip, residual=residual)


def _bias(conv: nn.Conv3d) -> Tensor:
    assert conv.bias is not None
    return conv.bias
