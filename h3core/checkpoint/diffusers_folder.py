"""The folder that diffusers saves: one subfolder per component, both transformers beside each other.

Keys and defaults of its configs: https://github.com/huggingface/diffusers, ``MiniMaxH3Transformer3DModel``,
``AutoencoderKLMiniMaxH3`` and ``AutoencoderKLMiniMaxH3Audio``. What they fix, this engine cannot do otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comfyui_h3.h3core.checkpoint.index import read_json
from comfyui_h3.h3core.checkpoint.sources import RELEASE_SHIFTS, Sources, text_encoder_config
from comfyui_h3.h3core.config import TRANSFORMERS, Partition
from comfyui_h3.h3core.errors import CheckpointError
from comfyui_h3.h3core.models.audio_vae.config import AudioVAEConfig
from comfyui_h3.h3core.models.dit.config import CLASS_NAME, DiTConfig
from comfyui_h3.h3core.models.fields import check_fields, is_positive
from comfyui_h3.h3core.models.video_vae.config import VideoVAEConfig

INDEXES = ("modular_model_index.json", "model_index.json")
PIPELINE = "MiniMaxH3ModularPipeline"

_DIT_KEYS = {  # ours -> theirs
    "hidden_size": "hidden_size",
    "num_layers": "num_layers",
    "token_refiner_num_layers": "num_refiner_layers",
    "num_attention_heads": "num_attention_heads",
    "attention_head_dim": "attention_head_dim",
    "ffn_hidden_size": "ffn_dim",
    "latents_dim": "in_channels",
    "audio_latents_dim": "audio_in_channels",
    "text_dim": "text_dim",
    "timestep_input_dim": "freq_dim",
    "time_embed_hidden_size": "time_embed_hidden_dim",
    "time_embed_dim": "time_embed_dim",
    "rope_inv_freq_len": "rope_freq_dim",
    "norm_eps": "norm_eps",
    "qk_norm_eps": "qk_norm_eps",
    "final_norm_eps": "final_norm_eps",
}
_DIT_FIXED: dict[str, Any] = {"patch_size": [1, 2, 2], "rope_theta": 10000.0}

_VIDEO_LIKE: dict[str, Any] = {
    "latent_channels": 24,
    "block_out_channels": [128, 256, 256, 512, 512, 1024],
    "layers_per_block": 2,
    "spatial_downsample_factors": [2, 2, 2, 2, 1, 1],
    "temporal_downsample_factors": [1, 2, 2, 1, 1, 1],
    "decoder_num_layers": 36,
    "decoder_num_attention_heads": 32,
    "decoder_attention_head_dim": 64,
    "decoder_rope_theta": 100.0,
    "decoder_rope_dim_ratio": 0.75,
    "latents_mean": [0.0],
    "latents_std": [1.0],
}
_VIDEO_FIXED: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "norm_num_groups": 32,
    "norm_eps": 1e-6,
    "spatial_padding_mode": "reflect",
    "decoder_num_register_tokens": 4,
    "decoder_ffn_mult": 4,
    "decoder_norm_eps": 1e-5,
    "clip_length": 17,
    "token_drop": 3,
}
_AUDIO_LIKE: dict[str, Any] = {
    "encoder_dim": 64,
    "encoder_rates": [2, 4, 4, 5, 5],
    "latent_dim": 2048,
    "latent_channels": 32,
    "decoder_dim": 1024,
    "decoder_rates": [5, 5, 2, 2, 2, 2, 2],
    "sampling_rate": 32000,
    "latents_mean": [0.0],
    "latents_std": [1.0],
}
_AUDIO_FIXED: dict[str, Any] = {
    "num_attention_heads": 8,
    "resblock_kernel_sizes": [3, 7, 11],
    "resblock_dilation_sizes": [[1, 3, 5]] * 3,
}


def is_diffusers_folder(folder: Path) -> bool:
    """Whether a model index in it is that of diffusers' H3 pipeline."""
    return any(read_json(folder / name).get("_class_name") == PIPELINE for name in _indexes(folder))


def diffusers_partitions(folder: Path) -> tuple[Partition, ...]:
    """Partitions whose transformer is in a folder of diffusers."""
    return tuple(name for name, part in TRANSFORMERS.items() if (folder / part / "config.json").is_file())


def diffusers_sources(folder: Path, partition: Partition) -> Sources:
    """Of one partition. Raises CheckpointError naming the file and the key that do not fit.

    A section ``_minimax_h3`` of the model index may name the text encoder's tap, as that of the release does.
    """
    transformer, video_vae, audio_vae = folder / TRANSFORMERS[partition], folder / "vae", folder / "audio_vae"
    releases = [read_json(folder / name).get("_minimax_h3") for name in _indexes(folder)]
    release = next((section for section in releases if isinstance(section, dict)), {})
    return Sources(
        folder=folder,
        video_shift=_shift(folder, "scheduler", "video"),
        audio_shift=_shift(folder, "audio_scheduler", "audio"),
        dit_config=dit_config(read_json(transformer / "config.json"), str(transformer / "config.json")),
        text_encoder_config=text_encoder_config(folder, release),
        video_vae_config=video_vae_config(read_json(video_vae / "config.json"), str(video_vae / "config.json")),
        audio_vae_config=audio_vae_config(read_json(audio_vae / "config.json"), str(audio_vae / "config.json")),
        transformer=transformer,
        text_encoder=folder / "text_encoder",
        video_vae=video_vae,
        audio_vae=audio_vae,
    )


def dit_config(values: Mapping[str, Any], source: str) -> DiTConfig:
    """From the config of ``MiniMaxH3Transformer3DModel``."""
    _check_class(values, "MiniMaxH3Transformer3DModel", source)
    release = DiTConfig()
    like = {theirs: getattr(release, ours) for ours, theirs in _DIT_KEYS.items()}
    check_fields(values, source, like=like, fixed=_DIT_FIXED)
    official = {ours: values[theirs] for ours, theirs in _DIT_KEYS.items()}
    return DiTConfig.from_dict({"_class_name": CLASS_NAME, "patch_size": [1, 2, 2], **official}, source)


def video_vae_config(values: Mapping[str, Any], source: str) -> VideoVAEConfig:
    """From the config of ``AutoencoderKLMiniMaxH3``, which leaves tiles to the code: 256 pixels, 64 shared."""
    _check_class(values, "AutoencoderKLMiniMaxH3", source)
    values = {**_VIDEO_FIXED, **values}
    check_fields(values, source, like=_VIDEO_LIKE, fixed=_VIDEO_FIXED)
    widths = values["block_out_channels"]
    if any(width % max(widths[0], 1) for width in widths):
        raise CheckpointError(f"{source}: block_out_channels={widths} are not multiples of the first")
    return VideoVAEConfig.from_dicts(
        {
            "vae_clip_length": 17,
            "vae_token_drop": 3,
            "vae_encoder_tiling": 1,
            "vae_decoder_tiling": 1,
            "vae_tile_size": 256,
            "vae_tile_overlap_min": 64,
            "latent_channels": values["latent_channels"],
            "latents_mean": values["latents_mean"],
            "latents_std": values["latents_std"],
        },
        {
            "causal_decoder": False,
            "causal_encoder": True,
            "ch": widths[0],
            "ch_mult": [width // widths[0] for width in widths],
            "embed_dim": values["latent_channels"],
            "in_channels": 3,
            "num_res_blocks": values["layers_per_block"],
            "num_res_blocks_decoder": None,
            "out_ch": 3,
            "padding_mode": "reflect",
            "padding_mode_t": None,
            "pixel_norm_type": "imagenet",
            "scaling_factor": 1.0,
            "shift_factor": 0.0,
            "space_down": values["spatial_downsample_factors"],
            "time_down": values["temporal_downsample_factors"],
            "use_3d_conv": True,
            "use_t_isolated_gn": True,
            "use_vit_decoder": True,
            "vae_ratio": 16,
            "vae_ratio_t": 4,
            "vit_decoder_kwargs": {
                "dim_head": values["decoder_attention_head_dim"],
                "ffn_activation_fn": "silu",
                "ffn_use_gated": True,
                "heads": values["decoder_num_attention_heads"],
                "norm_affine": True,
                "norm_type": "rms_norm",
                "num_layers": values["decoder_num_layers"],
                "qk_norm_affine": False,
                "qk_norm_type": "rms_norm",
                "rope_dim_ratio": values["decoder_rope_dim_ratio"],
                "rope_theta": values["decoder_rope_theta"],
            },
            "z_channels": values["latent_channels"],
            "zq_ch_decoder": None,
            "zq_ch_encoder": None,
        },
    )


def audio_vae_config(values: Mapping[str, Any], source: str) -> AudioVAEConfig:
    """From the config of ``AutoencoderKLMiniMaxH3Audio``."""
    _check_class(values, "AutoencoderKLMiniMaxH3Audio", source)
    values = {**_AUDIO_FIXED, **values}
    check_fields(values, source, like=_AUDIO_LIKE, fixed=_AUDIO_FIXED, ignored={"decoder_kernel_sizes"})
    config = AudioVAEConfig.from_dicts(
        {
            "output_channel": 2,
            "sample_rate": values["sampling_rate"],
            "latent_channels": values["latent_channels"],
            "latents_mean": values["latents_mean"],
            "latents_std": values["latents_std"],
        },
        {
            "metadata": {
                "kwargs": {
                    "attn_proj": True,
                    "decoder_type": "bigvgan",
                    "decoder_dim": values["decoder_dim"],
                    "decoder_rates": values["decoder_rates"],
                    "encoder_dim": values["encoder_dim"],
                    "encoder_rates": values["encoder_rates"],
                    "latent_dim": values["latent_dim"],
                    "sample_rate": values["sampling_rate"],
                    "vae_latent_channels": values["latent_channels"],
                }
            }
        },
    )
    kernels = values.get("decoder_kernel_sizes", list(config.decoder_kernels))
    if kernels != list(config.decoder_kernels):
        raise CheckpointError(
            f"{source}: decoder_kernel_sizes={kernels!r} is not supported, only {list(config.decoder_kernels)} is"
        )
    return config


def _check_class(values: Mapping[str, Any], wanted: str, source: str) -> None:
    found = values.get("_class_name")
    if found == "MiniMaxH3PrunedTransformer3DModel":
        raise CheckpointError(f"{source} describes {found!r}, a pruned AdaLN curve; this version does not read that")
    if found != wanted:
        raise CheckpointError(f"{source} describes {found!r}, not {wanted!r}; choose another folder")


def _indexes(folder: Path) -> list[str]:
    return [name for name in INDEXES if (folder / name).is_file()]


def _shift(folder: Path, scheduler: str, stream: str) -> float:
    file = folder / scheduler / "scheduler_config.json"
    shift = read_json(file).get("shift", RELEASE_SHIFTS[stream])
    if not is_positive(shift):
        raise CheckpointError(f"{file}: shift={shift!r} is not a number like {RELEASE_SHIFTS[stream]}")
    return float(shift)
