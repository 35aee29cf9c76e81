"""The tiny H3 in the layout of diffusers: the same weights, so that its pipeline is an oracle for this engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from comfyui_h3.h3core.checkpoint.diffusers_layout import (
    audio_vae_to_diffusers,
    dit_to_diffusers,
    video_vae_to_diffusers,
)
from comfyui_h3.h3core.config import Partition
from comfyui_h3.h3core.tiny import configs
from comfyui_h3.h3core.tiny.tokenizer import write_tokenizer
from comfyui_h3.h3core.tiny.write import (
    NUM_TEXT_ENCODER_SHARDS,
    NUM_TRANSFORMER_SHARDS,
    audio_vae_weights,
    save_sharded,
    text_encoder_weights,
    transformer_weights,
    video_vae_weights,
    write_text,
)

_VERSION = {"_diffusers_version": "0.36.0.dev0"}


def write_diffusers(out: Path, seed: int = 0) -> None:
    """Writes one folder with a subfolder per component; ``transformer`` is FL2VA's, ``transformer_ref`` Ref2VA's."""
    dit, vit = configs.TRANSFORMER, configs.VIDEO_VAE_SOURCE["vit_decoder_kwargs"]
    heads = (dit["num_attention_heads"], dit["attention_head_dim"])
    folders: dict[str, Partition] = {"transformer": "fl2va", "transformer_ref": "ref2va"}
    for name, partition in folders.items():
        write_text(out / name / "config.json", configs.dump(_transformer_config()))
        tensors = dit_to_diffusers(transformer_weights(seed, partition), *heads)
        save_sharded(tensors, out / name, "diffusion_pytorch_model", NUM_TRANSFORMER_SHARDS)
    write_text(out / "vae/config.json", configs.dump(_video_vae_config()))
    video = video_vae_to_diffusers(video_vae_weights(seed), vit["heads"], vit["dim_head"])
    save_sharded(video, out / "vae", "diffusion_pytorch_model", 1)
    write_text(out / "audio_vae/config.json", configs.dump(_audio_vae_config()))
    audio = audio_vae_to_diffusers(audio_vae_weights(seed))
    save_file(audio, out / "audio_vae/diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    write_text(out / "text_encoder/config.json", configs.dump(configs.TEXT_ENCODER))
    save_sharded(text_encoder_weights(seed), out / "text_encoder", "model", NUM_TEXT_ENCODER_SHARDS)
    write_tokenizer(out / "tokenizer")
    write_tokenizer(out / "processor")
    write_text(out / "processor/preprocessor_config.json", configs.dump(configs.IMAGE_PROCESSOR))
    write_text(out / "processor/video_preprocessor_config.json", configs.dump(configs.VIDEO_PROCESSOR))
    for name, shift in (("scheduler", 12.0), ("audio_scheduler", 3.0)):
        scheduler = {"_class_name": "MiniMaxH3Scheduler", **_VERSION, "shift": shift}
        write_text(out / name / "scheduler_config.json", configs.dump(scheduler))
    write_text(out / "modular_model_index.json", configs.dump(_model_index()))


def _transformer_config() -> dict[str, Any]:
    official = configs.TRANSFORMER
    names = {
        "num_attention_heads": "num_attention_heads",
        "attention_head_dim": "attention_head_dim",
        "hidden_size": "hidden_size",
        "num_layers": "num_layers",
        "num_refiner_layers": "token_refiner_num_layers",
        "ffn_dim": "ffn_hidden_size",
        "in_channels": "latents_dim",
        "audio_in_channels": "audio_latents_dim",
        "patch_size": "patch_size",
        "text_dim": "text_dim",
        "freq_dim": "timestep_input_dim",
        "time_embed_hidden_dim": "time_embed_hidden_size",
        "time_embed_dim": "time_embed_dim",
        "rope_freq_dim": "rope_inv_freq_len",
        "norm_eps": "norm_eps",
        "qk_norm_eps": "qk_norm_eps",
        "final_norm_eps": "final_norm_eps",
    }
    values = {theirs: official[ours] for theirs, ours in names.items()}
    return {"_class_name": "MiniMaxH3Transformer3DModel", **_VERSION, **values, "rope_theta": 10000.0}


def _video_vae_config() -> dict[str, Any]:
    source, vit = configs.VIDEO_VAE_SOURCE, configs.VIDEO_VAE_SOURCE["vit_decoder_kwargs"]
    return {
        "_class_name": "AutoencoderKLMiniMaxH3",
        **_VERSION,
        "in_channels": source["in_channels"],
        "out_channels": source["out_ch"],
        "latent_channels": source["z_channels"],
        "block_out_channels": [source["ch"] * factor for factor in source["ch_mult"]],
        "layers_per_block": source["num_res_blocks"],
        "spatial_downsample_factors": source["space_down"],
        "temporal_downsample_factors": source["time_down"],
        "decoder_num_layers": vit["num_layers"],
        "decoder_num_attention_heads": vit["heads"],
        "decoder_attention_head_dim": vit["dim_head"],
        "decoder_rope_theta": vit["rope_theta"],
        "decoder_rope_dim_ratio": vit["rope_dim_ratio"],
        "clip_length": configs.VIDEO_VAE["vae_clip_length"],
        "token_drop": configs.VIDEO_VAE["vae_token_drop"],
        "latents_mean": configs.VIDEO_VAE["latents_mean"],
        "latents_std": configs.VIDEO_VAE["latents_std"],
    }


def _audio_vae_config() -> dict[str, Any]:
    sizes = configs.AUDIO_VAE_METADATA["metadata"]["kwargs"]
    return {
        "_class_name": "AutoencoderKLMiniMaxH3Audio",
        **_VERSION,
        "encoder_dim": sizes["encoder_dim"],
        "encoder_rates": sizes["encoder_rates"],
        "latent_dim": sizes["latent_dim"],
        "latent_channels": sizes["vae_latent_channels"],
        "decoder_dim": sizes["decoder_dim"],
        "decoder_rates": sizes["decoder_rates"],
        "sampling_rate": sizes["sample_rate"],
        "latents_mean": configs.AUDIO_VAE["latents_mean"],
        "latents_std": configs.AUDIO_VAE["latents_std"],
    }


def _model_index() -> dict[str, Any]:
    classes = {
        "text_encoder": ("transformers", "Qwen3VLForConditionalGeneration"),
        "tokenizer": ("transformers", "Qwen2TokenizerFast"),
        "processor": ("transformers", "Qwen3VLProcessor"),
        "vae": ("diffusers", "AutoencoderKLMiniMaxH3"),
        "audio_vae": ("diffusers", "AutoencoderKLMiniMaxH3Audio"),
        "transformer": ("diffusers", "MiniMaxH3Transformer3DModel"),
        "transformer_ref": ("diffusers", "MiniMaxH3Transformer3DModel"),
        "scheduler": ("diffusers", "MiniMaxH3Scheduler"),
        "audio_scheduler": ("diffusers", "MiniMaxH3Scheduler"),
    }
    return {
        "_class_name": "MiniMaxH3ModularPipeline",
        **_VERSION,
        "_blocks_class_name": "MiniMaxH3Blocks",
        **{name: list(where) for name, where in classes.items()},
        "_minimax_h3": {"text_encoder_tap": configs.TAP},  # the release's is a constant of diffusers' code
    }
