"""The two config files of the video VAE: what is read, and what is refused by name."""

import copy
import json

import pytest

from comfyui_h3.h3core.errors import CheckpointError
from comfyui_h3.h3core.models.video_vae.config import VideoVAEConfig
from comfyui_h3.h3core.tiny import configs


@pytest.mark.parametrize("partition", ["FL2VA", "Ref2VA"])
def test_official_files_are_read(official_data, partition):
    folder = official_data / partition / "video_vae"
    config = VideoVAEConfig.from_dicts(
        json.loads((folder / "config.json").read_text()), json.loads((folder / "source" / "config.json").read_text())
    )
    assert (config.ch, config.ch_mult, config.num_res_blocks) == (128, (1, 2, 2, 4, 4, 8), 2)
    assert (config.hidden_size, config.num_heads, config.num_layers, config.rotary_dim) == (2048, 32, 36, 48)
    assert (config.tile_size, config.tile_overlap) == (256, 64)
    assert config.latents_mean[0] == 0.858090341091156
    assert config.latents_std[-1] == 2.6127843856811525


def test_lengths_follow_from_clip_and_drop():
    config = VideoVAEConfig.from_dicts(configs.VIDEO_VAE, configs.VIDEO_VAE_SOURCE)
    assert (config.tokens_per_clip, config.frame_pre_padding, config.token_overlap, config.frame_overlap) == (
        5,
        3,
        2,
        5,
    )


@pytest.mark.parametrize(
    ("where", "key", "value"),
    [
        ("wrapper", "vae_clip_length", 21),
        ("wrapper", "vae_token_drop", 2),
        ("wrapper", "vae_decoder_tiling", 0),
        ("wrapper", "vae_tile_size", 320),
        ("wrapper", "vae_tile_size", 0),
        ("wrapper", "vae_tile_size", 100),
        ("wrapper", "vae_tile_overlap_min", 256),
        ("wrapper", "vae_tile_overlap_min", 0),
        ("wrapper", "latents_std", [1.0]),
        ("wrapper", "new_option", True),
        ("source", "causal_encoder", False),
        ("source", "causal_decoder", True),
        ("source", "padding_mode", "zeros"),
        ("source", "pixel_norm_type", "none"),
        ("source", "use_t_isolated_gn", False),
        ("source", "use_vit_decoder", False),
        ("source", "zq_ch_decoder", 4),
        ("source", "z_channels", 16),
        ("source", "ch_mult", [1, 1]),
        ("source", "space_down", [2, 2, 2, 2, 2, 1]),
        ("source", "ch", 40),
        ("source", "new_option", 1),
        ("vit", "ffn_activation_fn", "gelu"),
        ("vit", "qk_norm_type", "layer_norm"),
        ("vit", "dim_head", 20),
        ("vit", "new_option", 1),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(where, key, value):
    config, source = copy.deepcopy(configs.VIDEO_VAE), copy.deepcopy(configs.VIDEO_VAE_SOURCE)
    {"wrapper": config, "source": source, "vit": source["vit_decoder_kwargs"]}[where][key] = value
    with pytest.raises(CheckpointError, match=key):
        VideoVAEConfig.from_dicts(config, source)


@pytest.mark.parametrize("key", ["latents_mean", "vae_tile_size", "vae_clip_length"])
def test_a_missing_key_is_named(key):
    config = {k: v for k, v in configs.VIDEO_VAE.items() if k != key}
    with pytest.raises(CheckpointError, match=f"video_vae/config.json lacks {key}"):
        VideoVAEConfig.from_dicts(config, configs.VIDEO_VAE_SOURCE)
