"""The VAEs of diffusers as oracles, over tiny configs and random weights.

Imports diffusers only where an oracle is made, so the tests that need none can take the rest from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from comfyui_h3.h3core.checkpoint.diffusers_layout import audio_vae_to_diffusers, video_vae_to_diffusers
from comfyui_h3.h3core.models.audio_vae.config import AudioVAEConfig
from comfyui_h3.h3core.models.video_vae.config import VideoVAEConfig
from comfyui_h3.h3core.tiny import configs


def tiny_video_config(*, tile_size: int = 256, tile_overlap: int = 64) -> VideoVAEConfig:
    config = {**configs.VIDEO_VAE, "vae_tile_size": tile_size, "vae_tile_overlap_min": tile_overlap}
    return VideoVAEConfig.from_dicts(config, configs.VIDEO_VAE_SOURCE)


def tiny_audio_config() -> AudioVAEConfig:
    return AudioVAEConfig.from_dicts(configs.AUDIO_VAE, configs.AUDIO_VAE_METADATA)


def diffusers_video_vae(config: VideoVAEConfig, state_dict: Mapping[str, Tensor]) -> Any:
    """``AutoencoderKLMiniMaxH3`` of the same sizes, tiles and (official) weights; every tensor must find its place."""
    from diffusers import AutoencoderKLMiniMaxH3

    vae: Any = AutoencoderKLMiniMaxH3(
        block_out_channels=tuple(config.ch * m for m in config.ch_mult),
        layers_per_block=config.num_res_blocks,
        decoder_num_layers=config.num_layers,
        decoder_num_attention_heads=config.num_heads,
        decoder_attention_head_dim=config.head_dim,
        decoder_rope_theta=config.rope_theta,
        decoder_rope_dim_ratio=config.rope_dim_ratio,
        latents_mean=config.latents_mean,
        latents_std=config.latents_std,
    )
    vae.enable_tiling(config.tile_size, config.tile_size, config.tile_overlap, config.tile_overlap)
    vae.load_state_dict(video_vae_to_diffusers(state_dict, config.num_heads, config.head_dim), strict=True)
    return vae.eval()


def diffusers_audio_vae(config: AudioVAEConfig, state_dict: Mapping[str, Tensor]) -> Any:
    """``AutoencoderKLMiniMaxH3Audio`` of the same sizes and (official) weights; every tensor must find its place."""
    from diffusers import AutoencoderKLMiniMaxH3Audio

    vae: Any = AutoencoderKLMiniMaxH3Audio(
        encoder_dim=config.encoder_dim,
        encoder_rates=config.encoder_rates,
        latent_dim=config.latent_dim,
        latent_channels=config.latent_channels,
        num_attention_heads=config.num_heads,
        decoder_dim=config.decoder_dim,
        decoder_rates=config.decoder_rates,
        decoder_kernel_sizes=config.decoder_kernels,
        sampling_rate=config.sample_rate,
        latents_mean=list(config.latents_mean),
        latents_std=list(config.latents_std),
    )
    vae.load_state_dict(audio_vae_to_diffusers(state_dict), strict=True)
    return vae.eval()


def randomize(module: nn.Module, seed: int) -> None:
    """Give every parameter of a VAE half a random value of the size it has in use.

    Fresh modules hide errors: with zero biases, registers and residual scales whole branches vanish. Sound must stay
    inside [-1, 1], where the decoder's clamp does nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("weight.original0"):  # lengths of weights with norm
                parameter.copy_(0.72 + 0.1 * noise)
            elif "norm" in name and name.endswith("weight"):
                parameter.copy_(1 + 0.1 * noise)
            elif "scale" in name:
                parameter.copy_(0.5 + 0.1 * noise)
            elif name.endswith("alpha") and parameter.ndim == 3:  # stored as it is; the vocoder's are logarithms
                parameter.copy_(1 + 0.1 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.03 * noise)
            elif parameter.ndim >= 2 and "token" not in name:
                parameter.copy_(noise / parameter[0].numel() ** 0.5)
            else:
                parameter.copy_(0.1 * noise)
