"""The encoding half of the audio VAE: the module, and ``encode``, which makes latents of a waveform."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.models.audio_vae.config import AudioVAEConfig
from comfyui_h3.h3core.models.audio_vae.weight_norm import WeightNormConv1d, fold_weight_norm
from comfyui_h3.h3core.models.precision import exact_fp32


class Snake(nn.Module):
    """x + sin(alpha x)^2 / alpha per channel; alpha (1, C, 1) is stored as it is."""

    def __init__(self, channels: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.alpha + 1e-9).reciprocal() * torch.sin(self.alpha * x).pow(2)


class ResidualUnit(nn.Module):
    """A dilated convolution of 7 and one of 1, each after Snake; length kept."""

    def __init__(self, channels: int, dilation: int):
        super().__init__()
        self.block = nn.Sequential(
            Snake(channels),
            WeightNormConv1d(channels, channels, 7, dilation=dilation, padding=3 * dilation),
            Snake(channels),
            WeightNormConv1d(channels, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


class Stage(nn.Module):
    """Three residual units, then a convolution that divides the length by ``stride`` and doubles the width."""

    def __init__(self, channels: int, stride: int, dilations: tuple[int, ...] = (1, 3, 9)):
        super().__init__()
        self.block = nn.Sequential(
            *(ResidualUnit(channels, dilation) for dilation in dilations),
            Snake(channels),
            WeightNormConv1d(channels, 2 * channels, 2 * stride, stride=stride, padding=-(-stride // 2)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class WaveEncoder(nn.Module):
    """(B, 1, L) with L a multiple of 800 -> (B, latent_dim, L / 800)."""

    def __init__(self, config: AudioVAEConfig):
        super().__init__()
        channels = config.encoder_dim
        blocks: list[nn.Module] = [WeightNormConv1d(1, channels, 7, padding=3)]
        for stride in config.encoder_rates:
            blocks.append(Stage(channels, stride))
            channels *= 2
        self.block = nn.Sequential(
            *blocks, Snake(channels), WeightNormConv1d(channels, config.latent_dim, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class PooledAttention(nn.Module):
    """Causal attention whose heads are averaged and then pooled to the latent width: (B, T, D) -> (B, T, 32)."""

    zero_k_bias: Tensor

    def __init__(self, config: AudioVAEConfig):
        super().__init__()
        dim = config.latent_dim
        self.num_heads = config.num_heads
        self.out_channels = config.latent_channels
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)  # rows: all of q, all of k, all of v
        self.q_bias = nn.Parameter(torch.zeros(dim))
        self.v_bias = nn.Parameter(torch.zeros(dim))
        self.register_buffer("zero_k_bias", torch.zeros(dim))
        self.proj = nn.Linear(config.latent_channels, config.latent_channels)

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat([self.q_bias, self.zero_k_bias, self.v_bias])
        qkv = F.linear(x, self.qkv.weight, bias).unflatten(-1, (3, self.num_heads, -1))  # (B, T, 3, N, H)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, N, T, H)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).mean(dim=1)  # (B, T, H)
        return self.proj(F.adaptive_avg_pool1d(out, self.out_channels))


class GatedMLP(nn.Module):
    """Gated MLP of twice the width, with a norm of its own in front."""

    def __init__(self, channels: int, inner: int):
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.w0 = nn.Linear(channels, inner)
        self.w1 = nn.Linear(channels, inner)
        self.w2 = nn.Linear(inner, channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.w2(F.gelu(self.w0(x), approximate="tanh") * self.w1(x))


class PreBlock(nn.Module):
    """One transformer block that also narrows the width: (B, T, latent_dim) -> (B, T, 32)."""

    def __init__(self, config: AudioVAEConfig):
        super().__init__()
        dim, channels = config.latent_dim, config.latent_channels
        self.norm1 = nn.LayerNorm(dim)
        self.attn = PooledAttention(config)
        self.norm3 = nn.LayerNorm(dim)
        self.proj = nn.Linear(dim, channels)
        self.norm2 = nn.LayerNorm(channels)
        self.mlp = GatedMLP(channels, config.mlp_ratio * channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.proj(self.norm3(x)) + self.attn(self.norm1(x))
        return y + self.mlp(self.norm2(y))


class AudioEncoder(nn.Module):
    """Mono waveforms (B, 1, L), L a multiple of 800 -> means (B, 32, L / 800) of their latents. fp32 only."""

    def __init__(self, config: AudioVAEConfig):
        super().__init__()
        self.config = config
        self.encoder = WaveEncoder(config)
        self.pre_block = PreBlock(config)
        self.mean_proj = nn.Conv1d(config.latent_channels, config.latent_channels, 1)
        self.logs_proj = nn.Conv1d(config.latent_channels, config.latent_channels, 1)  # of training; never evaluated

    def fold_weight_norm(self) -> None:
        """Fold the weights once they are there: the same latents without computing every weight anew in each call."""
        fold_weight_norm(self)

    def forward(self, x: Tensor) -> Tensor:
        features = self.encoder(x).transpose(1, 2)  # (B, T, latent_dim)
        return self.mean_proj(self.pre_block(features).transpose(1, 2))


@torch.no_grad()
def encode(encoder: AudioEncoder, samples: Tensor) -> Tensor:
    """Two channels of sound (2, L) fp32 at 32 kHz -> normalised latents (2, 32, ceil(L / 800)) fp32 on the CPU.

    The latents are the mean of the posterior, never a draw. The end is filled with silence to a multiple of 800.
    Raises RequestError for an empty waveform.
    """
    config = encoder.config
    if not samples.shape[-1]:
        raise RequestError("a waveform without samples cannot be encoded; use a sound of at least one sample")
    samples = samples.to(encoder.mean_proj.weight.device, torch.float32)
    samples = F.pad(samples, (0, -samples.shape[-1] % config.hop_length))
    with exact_fp32(cudnn=False), sdpa_kernel(SDPBackend.MATH):
        latents = encoder(samples[:, None]).cpu()
    mean = latents.new_tensor(config.latents_mean)[:, None]
    std = latents.new_tensor(config.latents_std)[:, None]
    return (latents - mean) / std
