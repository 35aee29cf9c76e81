"""What the config files of ``audio_vae`` say, as numbers; everything this code cannot do is refused here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from comfyui_h3.h3core.errors import CheckpointError
from comfyui_h3.h3core.models.fields import check_fields

_CONFIG_FILE = "audio_vae/config.json"
_METADATA_FILE = "audio_vae/metadata.json"

# Keys with one supported value. A key in none of these tables may change the network, so it is refused by name.
_CONFIG_FIXED: dict[str, Any] = {"output_channel": 2}
_CONFIG_LIKE: dict[str, Any] = {
    "sample_rate": 32000,
    "latent_channels": 32,
    "latents_mean": [0.0],
    "latents_std": [1.0],
}
_CONFIG_IGNORED = {"auto_map", "source_config_path", "source_safetensors_path", "source_metadata_path"}
_KWARGS_FIXED: dict[str, Any] = {"attn_proj": True, "decoder_type": "bigvgan"}
_KWARGS_LIKE: dict[str, Any] = {
    "decoder_dim": 1024,
    "decoder_rates": [5, 5, 2, 2, 2, 2, 2],
    "encoder_dim": 64,
    "encoder_rates": [2, 4, 4, 5, 5],
    "latent_dim": 2048,
    "sample_rate": 32000,
    "vae_latent_channels": 32,
}

# Kernel of an upsampling stage by its rate; the files do not say it, the released weights have it.
_UPSAMPLE_KERNELS = {5: 9, 2: 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioVAEConfig:
    """Sizes of the audio VAE. It is a mono network: the channels of stereo sound are two items of a batch."""

    encoder_dim: int
    encoder_rates: tuple[int, ...]
    latent_dim: int
    latent_channels: int
    decoder_dim: int
    decoder_rates: tuple[int, ...]
    sample_rate: int
    latents_mean: tuple[float, ...]
    latents_std: tuple[float, ...]
    num_heads: int = 8
    mlp_ratio: int = 2
    resblock_kernels: tuple[int, ...] = (3, 7, 11)
    dilations: tuple[int, ...] = (1, 3, 5)

    @property
    def hop_length(self) -> int:
        """Samples of one latent (800)."""
        return math.prod(self.decoder_rates)

    @property
    def decoder_kernels(self) -> tuple[int, ...]:
        return tuple(_UPSAMPLE_KERNELS[rate] for rate in self.decoder_rates)

    @classmethod
    def from_dicts(cls, config: Mapping[str, Any], metadata: Mapping[str, Any]) -> "AudioVAEConfig":
        """Read ``audio_vae/config.json`` and ``audio_vae/metadata.json``; raise CheckpointError naming the key."""
        check_fields(config, _CONFIG_FILE, like=_CONFIG_LIKE, fixed=_CONFIG_FIXED, ignored=_CONFIG_IGNORED)
        try:
            kwargs = metadata["metadata"]["kwargs"]
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{_METADATA_FILE} lacks metadata.kwargs, the sizes of the network") from error
        check_fields(kwargs, f"{_METADATA_FILE}, kwargs", like=_KWARGS_LIKE, fixed=_KWARGS_FIXED)
        for key, other in (("latent_channels", "vae_latent_channels"), ("sample_rate", "sample_rate")):
            if config[key] != kwargs[other]:
                raise CheckpointError(
                    f"{_CONFIG_FILE}: {key}={config[key]} differs from {other}={kwargs[other]} of {_METADATA_FILE}"
                )
        result = cls(
            encoder_dim=kwargs["encoder_dim"],
            encoder_rates=tuple(kwargs["encoder_rates"]),
            latent_dim=kwargs["latent_dim"],
            latent_channels=kwargs["vae_latent_channels"],
            decoder_dim=kwargs["decoder_dim"],
            decoder_rates=tuple(kwargs["decoder_rates"]),
            sample_rate=config["sample_rate"],
            latents_mean=tuple(config["latents_mean"]),
            latents_std=tuple(config["latents_std"]),
        )
        _check_sizes(result)
        return result


def _check_sizes(config: AudioVAEConfig) -> None:
    for rate in config.decoder_rates:
        if rate not in _UPSAMPLE_KERNELS:
            rates = list(config.decoder_rates)
            raise CheckpointError(f"{_METADATA_FILE}: decoder_rates={rates} may hold {sorted(_UPSAMPLE_KERNELS)} only")
    if math.prod(config.encoder_rates) != config.hop_length:
        raise CheckpointError(
            f"{_METADATA_FILE}: encoder_rates={list(config.encoder_rates)} and decoder_rates="
            f"{list(config.decoder_rates)} must multiply to the same number of samples"
        )
    if config.decoder_dim % 2 ** len(config.decoder_rates):
        raise CheckpointError(
            f"{_METADATA_FILE}: decoder_dim={config.decoder_dim} must halve {len(config.decoder_rates)} times"
        )
    if config.latent_dim % (config.num_heads * config.latent_channels):
        raise CheckpointError(
            f"{_METADATA_FILE}: latent_dim={config.latent_dim} must be a multiple of {config.num_heads} heads x "
            f"{config.latent_channels} latent channels"
        )
    for key in ("latents_mean", "latents_std"):
        count = len(getattr(config, key))
        if count != config.latent_channels:
            raise CheckpointError(
                f"{_CONFIG_FILE}: {key} has {count} values, latent_channels is {config.latent_channels}"
            )
