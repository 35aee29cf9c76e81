"""The ViT that turns latents into pixels: full attention over one tile of one time window.

Rounding in half precision, where the released decoder runs under autocast: the matrix products of the blocks, q and
k after their norm, the rotation and SwiGLU are half; the residual, the norms, the scales, the embedder and the
output projection are fp32. The kernels round at the same points.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfyui_h3.h3core.models.video_vae.config import VideoVAEConfig
from comfyui_h3.kernels.qkv_norm_rope import qkv_norm_rope
from comfyui_h3.kernels.scaled_residual_norm import scaled_residual_norm
from comfyui_h3.kernels.split_linear import split_linear
from comfyui_h3.kernels.swiglu_half import swiglu_half

AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v (B, S, N, H) -> (B, S, N, H)

EPS = 1e-5


@functools.lru_cache(maxsize=16)
def rotary_table(
    grid: tuple[int, int, int],
    num_suffix: int,
    rotary_dim: int,
    theta: float,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """cos, sin (S, rotary_dim / 2) in ``dtype`` for a tile of ``grid`` = (T, h, w) and the suffix tokens.

    Positions run from -1 to 1 over the tile, whatever its size; the suffix has position 0. In the fp16 flow the
    positions themselves are rounded to fp16, as the released decoder does; bf16 would lose too much and takes fp32.
    """
    position_dtype = torch.float16 if dtype == torch.float16 else torch.float32
    num_freqs = rotary_dim // 6
    exponent = torch.arange(num_freqs, dtype=torch.float32, device=device) / num_freqs
    inv_freq = 1.0 / theta**exponent
    angles = []
    for axis, length in enumerate(grid):
        position = torch.arange(0.5, length, dtype=position_dtype, device=device) / length * 2 - 1
        angle = (position * (2 * math.pi))[:, None].float() * inv_freq  # (length, num_freqs)
        shape = [1, 1, 1, num_freqs]
        shape[axis] = length
        angles.append(angle.view(shape).expand(*grid, num_freqs))
    angle = torch.cat(angles, dim=-1).flatten(0, 2)  # (T*h*w, rotary_dim / 2): t, y, x
    angle = F.pad(angle, (0, 0, 0, num_suffix))
    return angle.cos().to(dtype), angle.sin().to(dtype)


class Attention(nn.Module):
    """Attention of all tokens of a tile; the rows of ``to_qkv`` are q, k, v of head 0, then of head 1, ..."""

    def __init__(self, config: VideoVAEConfig, attend: AttentionFn):
        super().__init__()
        dim = config.hidden_size
        self.num_heads = config.num_heads
        self.attend = attend
        self.to_qkv = nn.Linear(dim, 3 * dim)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # x (B, S, D) in the dtype of the weights
        qkv = self.to_qkv(x).unflatten(-1, (self.num_heads, 3, -1))  # (B, S, N, 3, H)
        return self.to_out(self.attend(*qkv_norm_rope(qkv, cos, sin, EPS)).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU; the rows of ``w1`` are the gate, then the value."""

    def __init__(self, config: VideoVAEConfig):
        super().__init__()
        dim, inner = config.hidden_size, config.hidden_size * config.ffn_mult
        self.w1 = nn.Linear(dim, 2 * inner)
        self.w2 = nn.Linear(inner, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(swiglu_half(self.w1(x)))


class Block(nn.Module):
    """Attention and SwiGLU, each normed before and scaled per channel after."""

    def __init__(self, config: VideoVAEConfig, attend: AttentionFn):
        super().__init__()
        dim = config.hidden_size
        self.norm1 = nn.RMSNorm(dim, eps=EPS)
        self.attn = Attention(config, attend)
        self.scale1 = nn.Parameter(torch.zeros(dim))
        self.norm2 = nn.RMSNorm(dim, eps=EPS)
        self.ff = FeedForward(config)
        self.scale2 = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor, y: Tensor | None, scale: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
        """The last product of the block (B, S, D), still to be added to x, ``scale2`` times.

        x (B, S, D): the fp32 residual, changed in place. y, scale: what the block before left to add, or None. So every
        sum is one pass with the norm behind it.
        """
        h = scaled_residual_norm(x, y, scale, self.norm1.weight, EPS, cos.dtype)
        y = self.attn(h, cos, sin)
        h = scaled_residual_norm(x, y, self.scale1, self.norm2.weight, EPS, cos.dtype)
        return self.ff(h)


class ViT(nn.Module):
    """Latents of a tile to its patches: every token becomes 4 frames of 16 x 16 pixels."""

    mask_token: Tensor

    def __init__(self, config: VideoVAEConfig, attend: AttentionFn):
        super().__init__()
        dim = config.hidden_size
        self.patch = (config.pixel_channels, config.time_ratio, config.space_ratio, config.space_ratio)
        self.rotary_dim = config.rotary_dim
        self.rope_theta = config.rope_theta
        self.x_embedder = nn.Linear(config.latent_channels, dim)
        self.register_tokens = nn.Parameter(torch.zeros(1, config.num_register_tokens, dim))
        self.register_buffer("mask_token", torch.zeros(1, 1, dim))  # of training; stored, never read
        self.transformer_blocks = nn.ModuleList(Block(config, attend) for _ in range(config.num_layers))
        self.norm_out = nn.LayerNorm(dim, eps=EPS)
        self.proj_out = nn.Linear(dim, math.prod(self.patch))

    def forward(self, z: Tensor) -> Tensor:
        # z (B, C, T, h, w) in the dtype of the blocks -> (B, T * h * w, 3 * 4 * 16 * 16) fp32
        batch, _, *grid = z.shape
        num_tokens = math.prod(grid)
        x = self.x_embedder(z.flatten(2).transpose(1, 2).float()).to(z.dtype)  # (B, N, D)
        # The tokens come first, then the registers, then one token of zeros; the residual is fp32 from here.
        suffix = F.pad(self.register_tokens, (0, 0, 0, 1)).expand(batch, -1, -1)
        x = torch.cat([x.float(), suffix], dim=1)  # (B, S, D)
        cos, sin = rotary_table(
            (grid[0], grid[1], grid[2]), suffix.shape[1], self.rotary_dim, self.rope_theta, z.dtype, z.device
        )
        y: Tensor | None = None
        scale: Any = None
        for block in self.transformer_blocks:
            y = block(x, y, scale, cos, sin)
            scale = block.scale2
        assert y is not None, "a decoder has blocks"
        x = x + y * scale
        return split_linear(self.norm_out(x), self.proj_out.weight, self.proj_out.bias)[:, :num_tokens]
