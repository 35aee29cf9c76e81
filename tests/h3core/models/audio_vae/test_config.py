"""The config files of the audio VAE: what is read, and what is refused by name."""

import copy
import json

import pytest

from comfyui_h3.h3core.errors import CheckpointError
from comfyui_h3.h3core.models.audio_vae.config import AudioVAEConfig
from comfyui_h3.h3core.tiny import configs


@pytest.mark.parametrize("partition", ["FL2VA", "Ref2VA"])
def test_official_files_are_read(official_data, partition):
    folder = official_data / partition / "audio_vae"
    config = AudioVAEConfig.from_dicts(
        json.loads((folder / "config.json").read_text()), json.loads((folder / "metadata.json").read_text())
    )
    assert (config.encoder_dim, config.latent_dim, config.latent_channels, config.decoder_dim) == (64, 2048, 32, 1024)
    assert (config.decoder_rates, config.decoder_kernels) == ((5, 5, 2, 2, 2, 2, 2), (9, 9, 4, 4, 4, 4, 4))
    assert (config.sample_rate, config.hop_length) == (32000, 800)
    assert config.latents_mean[0] == -0.020211687488382354


@pytest.mark.parametrize(
    ("where", "key", "value"),
    [
        ("config", "output_channel", 1),
        ("config", "latent_channels", 16),
        ("config", "latents_std", [1.0]),
        ("config", "sample_rate", 44100),
        ("config", "new_option", 1),
        ("kwargs", "decoder_type", "dac"),
        ("kwargs", "attn_proj", False),
        ("kwargs", "decoder_rates", [5, 5, 4, 4, 2]),
        ("kwargs", "encoder_rates", [2, 4, 4, 5]),
        ("kwargs", "decoder_dim", 100),
        ("kwargs", "latent_dim", 192),
        ("kwargs", "new_option", 1),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(where, key, value):
    config, metadata = copy.deepcopy(configs.AUDIO_VAE), copy.deepcopy(configs.AUDIO_VAE_METADATA)
    {"config": config, "kwargs": metadata["metadata"]["kwargs"]}[where][key] = value
    with pytest.raises(CheckpointError, match=key):
        AudioVAEConfig.from_dicts(config, metadata)


def test_missing_keys_are_named():
    with pytest.raises(CheckpointError, match=r"metadata\.kwargs"):
        AudioVAEConfig.from_dicts(configs.AUDIO_VAE, {})
    with pytest.raises(CheckpointError, match="lacks latents_mean"):
        AudioVAEConfig.from_dicts(
            {k: v for k, v in configs.AUDIO_VAE.items() if k != "latents_mean"}, configs.AUDIO_VAE_METADATA
        )
