"""The ViT that turns latents into pixels: full attention over one tile of one time window.

Rounding in half precision, where the released decoder runs under autocast: the matrix products of the blocks, q and
k after their norm, the rotation and SwiGLU are half; the residual, the norms, the scales, the embedder and the
output projection are fp32.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfyui_h3.h3core.models.video_vae.config import VideoVAEConfig

AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v (B, S, N, H) -> (B, S, N, H)

EPS = 1e-5


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Full softmax attention, scale 1 / sqrt(H); q, k, v: (B, S, N, H) -> (B, S, N, H)."""
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return out.transpose(1, 2)


@functools.lru_cache(maxsize=16)
def rotary_table(
    grid: tuple[int, int, int],
    num_suffix: int,
    rotary_dim: int,
    theta: float,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """cos, sin (S, 1, rotary_dim / 2) in ``dtype`` for a tile of ``grid`` = (T, h, w) and the suffix tokens.

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
    angle = F.pad(angle, (0, 0, 0, num_suffix))[:, None]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel k with channel k + R/2, k < R/2; x (..., S, N, H), cos and sin (S, 1, R/2)."""
    half = cos.shape[-1]
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


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
        q, k, v = qkv.unbind(-2)
        return self.to_out(self.attend(self._place(q, cos, sin), self._place(k, cos, sin), v).flatten(-2))

    @staticmethod
    def _place(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(F.rms_norm(x.float(), x.shape[-1:], eps=EPS).to(x.dtype), cos, sin)


class FeedForward(nn.Module):
    """SwiGLU; the rows of ``w1`` are the gate, then the value."""

    def __init__(self, config: VideoVAEConfig):
        super().__init__()
        dim, inner = config.hidden_size, config.hidden_size * config.ffn_mult
        self.w1 = nn.Linear(dim, 2 * inner)
        self.w2 = nn.Linear(inner, dim)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.w1(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * value)


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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # x (B, S, D) fp32; a half product times its fp32 scale is fp32
        x = x + self.attn(self.norm1(x).to(cos.dtype), cos, sin) * self.scale1
        return x + self.ff(self.norm2(x).to(cos.dtype)) * self.scale2


class ViT(nn.Module):
    """Latents of a tile to its pixels: every token becomes a block of 4 frames x 16 x 16 pixels."""

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
        # z (B, C, T, h, w) in the dtype of the blocks -> (B, 3, 4T, 16h, 16w) fp32
        batch, _, *grid = z.shape
        num_tokens = math.prod(grid)
        x = self.x_embedder(z.flatten(2).transpose(1, 2).float()).to(z.dtype)  # (B, N, D)
        # The tokens come first, then the registers, then one token of zeros; the residual is fp32 from here.
        suffix = F.pad(self.register_tokens, (0, 0, 0, 1)).expand(batch, -1, -1)
        x = torch.cat([x.float(), suffix], dim=1)  # (B, S, D)
        cos, sin = rotary_table(
            (grid[0], grid[1], grid[2]), suffix.shape[1], self.rotary_dim, self.rope_theta, z.dtype, z.device
        )
        for block in self.transformer_blocks:
            x = block(x, cos, sin)
        patches = self.proj_out(self.norm_out(x))[:, :num_tokens]
        patches = patches.view(batch, *grid, *self.patch)  # (B, T, h, w, 3, 4, 16, 16)
        patches = patches.permute(0, 4, 1, 5, 2, 6, 3, 7)  # (B, 3, T, 4, h, 16, w, 16)
        return patches.reshape(batch, patches.shape[1], *(n * p for n, p in zip(grid, self.patch[1:], strict=True)))
