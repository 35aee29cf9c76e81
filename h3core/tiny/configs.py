"""Sizes of the tiny H3: small, and fitting each other as the real ones do, in the official config formats."""

from __future__ import annotations

import json
from typing import Any

from comfyui_h3.h3core.tiny.tokenizer import FIRST_SPECIAL, SPECIAL_TOKENS

TAP = 5  # text layers whose output is the conditioning; the file has one more, as the real one has fourteen more

LATENT_CHANNELS = 24
AUDIO_CHANNELS = 32

TRANSFORMER: dict[str, Any] = {
    "_class_name": "MiniMaxH3DiTModel",
    "_diffusers_version": "0.32.2",
    "hidden_size": 64,
    "num_layers": 4,
    "token_refiner_num_layers": 2,
    "num_attention_heads": 56,  # every sequence-parallel degree of the real model divides it
    "attention_head_dim": 32,
    "ffn_hidden_size": 96,
    "latents_dim": LATENT_CHANNELS,
    "audio_latents_dim": AUDIO_CHANNELS,
    "patch_size": [1, 2, 2],
    "text_dim": 128,
    "timestep_input_dim": 32,
    "time_embed_hidden_size": 64,
    "time_embed_dim": 40,
    "adaln_out_features": 1152,
    "final_adaln_out_features": 128,
    "rope_inv_freq_len": 4,
    "norm_eps": 1e-05,
    "qk_norm_eps": 1e-05,
    "final_norm_eps": 1e-05,
}

VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = (
    FIRST_SPECIAL + SPECIAL_TOKENS.index(f"<|{name}|>")
    for name in ("vision_start", "vision_end", "image_pad", "video_pad")
)
VOCAB_SIZE = 512

TEXT_ENCODER: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": IMAGE_PAD,
    "model_type": "qwen3_vl",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 448,
        "dtype": "bfloat16",
        "eos_token_id": 450,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 128,
        "initializer_range": 0.02,
        "intermediate_size": 256,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 16,
        "num_hidden_layers": TAP + 1,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"},
        "rope_theta": 5000000,
        "use_cache": True,
        "vocab_size": VOCAB_SIZE,
    },
    "tie_word_embeddings": False,
    "video_token_id": VIDEO_PAD,
    "vision_config": {
        "deepstack_visual_indexes": [0, 1, 2],
        "depth": 4,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 32,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 64,
        "model_type": "qwen3_vl",
        "num_heads": 2,
        "num_position_embeddings": 64,
        "out_hidden_size": 128,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "vision_end_token_id": VISION_END,
    "vision_start_token_id": VISION_START,
}

# Channel statistics like those of a trained VAE in kind: no channel at mean 0, no channel at std 1.
_VIDEO_STATS = {
    "latents_mean": [round(0.9 * (-1) ** i * (1 + i % 5) / 5, 4) for i in range(LATENT_CHANNELS)],
    "latents_std": [round(0.5 + 0.11 * (i % 23), 4) for i in range(LATENT_CHANNELS)],
}
_AUDIO_STATS = {
    "latents_mean": [round(0.3 * (-1) ** i * (1 + i % 7) / 7, 4) for i in range(AUDIO_CHANNELS)],
    "latents_std": [round(0.8 + 0.07 * (i % 19), 4) for i in range(AUDIO_CHANNELS)],
}

VIDEO_VAE: dict[str, Any] = {
    "_class_name": "MiniMaxH3VideoVAE",
    "_diffusers_version": "0.32.2",
    "mode": "standalone",
    "source_path": "source",
    "source_class_name": "AutoencoderKLLegacy",
    "vae_clip_length": 17,
    "vae_token_drop": 3,
    "vae_encoder_tiling": 1,
    "vae_decoder_tiling": 1,
    "vae_parallel_tiling": 1,
    "vae_tile_size": 256,
    "vae_tile_overlap_min": 64,
    "vae_encoder_parallel": 0,
    "vae_decoder_parallel": 0,
    "vae_chunk_dim": -1,
    "source_safetensors_path": "model.safetensors",
    "latent_channels": LATENT_CHANNELS,
    **_VIDEO_STATS,
}

VIDEO_VAE_SOURCE: dict[str, Any] = {
    "_class_name": "AutoencoderKLLegacy",
    "_diffusers_version": "0.32.2",
    "causal_decoder": False,
    "causal_encoder": True,
    "ch": 32,
    "ch_mult": [1, 1, 1, 2, 2, 2],
    "embed_dim": LATENT_CHANNELS,
    "in_channels": 3,
    "num_res_blocks": 1,
    "num_res_blocks_decoder": None,
    "out_ch": 3,
    "padding_mode": "reflect",
    "padding_mode_t": None,
    "pixel_norm_type": "imagenet",
    "scaling_factor": 1.0,
    "shift_factor": 0.0,
    "space_down": [2, 2, 2, 2, 1, 1],
    "space_up": [1, 2, 2, 2, 2, 1],
    "time_down": [1, 2, 2, 1, 1, 1],
    "time_up": None,
    "use_3d_conv": True,
    "use_t_isolated_gn": True,
    "use_vit_decoder": True,
    "vae_ratio": 16,
    "vae_ratio_t": 4,
    "vit_decoder_kwargs": {
        "dim_head": 16,
        "ffn_activation_fn": "silu",
        "ffn_use_gated": True,
        "heads": 2,
        "norm_affine": True,
        "norm_type": "rms_norm",
        "num_layers": 3,
        "qk_norm_affine": False,
        "qk_norm_type": "rms_norm",
        "rope_dim_ratio": 0.75,
        "rope_theta": 100.0,
    },
    "z_channels": LATENT_CHANNELS,
    "zq_ch_decoder": None,
    "zq_ch_encoder": None,
}

AUDIO_VAE: dict[str, Any] = {
    "_class_name": "MiniMaxH3AudioVAE",
    "_diffusers_version": "0.32.2",
    "output_channel": 2,
    "sample_rate": 32000,
    "source_config_path": "config.yaml",
    "source_safetensors_path": "model.safetensors",
    "source_metadata_path": "metadata.json",
    "latent_channels": AUDIO_CHANNELS,
    **_AUDIO_STATS,
}

AUDIO_VAE_METADATA: dict[str, Any] = {
    "metadata": {
        "kwargs": {
            "attn_proj": True,
            "decoder_dim": 256,
            "decoder_rates": [5, 5, 2, 2, 2, 2, 2],
            "decoder_type": "bigvgan",
            "encoder_dim": 4,
            "encoder_rates": [2, 4, 4, 5, 5],
            "latent_dim": 256,
            "sample_rate": 32000,
            "vae_latent_channels": AUDIO_CHANNELS,
        }
    }
}

AUDIO_VAE_YAML = (
    f"model_config:\n  sr: 32000\n  decoder_dim: 256\n  audio_channel: 1\n  vae_latent_channels: {AUDIO_CHANNELS}\n"
)

# The release's bounds for one image (65,536 to 16,777,216 pixels), with a floor that keeps tiny media tiny.
IMAGE_PROCESSOR: dict[str, Any] = {
    "size": {"longest_edge": 16777216, "shortest_edge": 4096},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
VIDEO_PROCESSOR: dict[str, Any] = {
    **{key: value for key, value in IMAGE_PROCESSOR.items() if key != "image_processor_type"},
    "size": {"longest_edge": 25165824, "shortest_edge": 4096},
    "video_processor_type": "Qwen3VLVideoProcessor",
}


def model_index(partition: str) -> dict[str, Any]:
    """``model_index.json`` of "fl2va" or "ref2va"."""
    return {
        "_class_name": "MiniMaxH3Pipeline",
        "_diffusers_version": "0.32.2",
        "text_encoder": ["transformers", "MiniMaxH3Qwen3VLHFEncoder"],
        "tokenizer": ["transformers", "Qwen2TokenizerFast"],
        "video_vae": ["diffusers", "MiniMaxH3VideoVAE"],
        "audio_vae": ["diffusers", "MiniMaxH3AudioVAE"],
        "scheduler": None,
        "transformer": ["diffusers", "MiniMaxH3DiTModel"],
        "processor": ["transformers", "Qwen3VLProcessor"],
        "_minimax_h3": {
            "schema_version": 1,
            "partition": partition,
            "tasks": ["t2va", "fl2va"] if partition == "fl2va" else ["ref2va"],
            "task_aliases": {},
            "sigma_shift_scales": {"video": 12.0, "audio": 3.0},
            "text_encoder_tap": TAP,
        },
    }


def dump(values: dict[str, Any]) -> str:
    """JSON as the checkpoint's files have it."""
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"
