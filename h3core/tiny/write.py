"""Writes the tiny H3 to a folder: in the official layout, or in the one diffusers reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from comfyui_h3.h3core.checkpoint.loader import build
from comfyui_h3.h3core.config import PARTITIONS, Partition
from comfyui_h3.h3core.models.audio_vae.config import AudioVAEConfig
from comfyui_h3.h3core.models.audio_vae.decoder import AudioDecoder
from comfyui_h3.h3core.models.audio_vae.encoder import AudioEncoder
from comfyui_h3.h3core.models.dit.adaln import Modulator
from comfyui_h3.h3core.models.dit.config import DiTConfig
from comfyui_h3.h3core.models.dit.model import DiT
from comfyui_h3.h3core.models.video_vae.config import VideoVAEConfig
from comfyui_h3.h3core.models.video_vae.decoder import VideoDecoder
from comfyui_h3.h3core.models.video_vae.encoder import VideoEncoder
from comfyui_h3.h3core.tiny import configs
from comfyui_h3.h3core.tiny.tokenizer import write_tokenizer
from comfyui_h3.h3core.tiny.weights import (
    AUDIO_VAE_RULES,
    TEXT_ENCODER_RULES,
    VIDEO_VAE_RULES,
    fill,
    transformer_rules,
)

NUM_TRANSFORMER_SHARDS = 3
NUM_TEXT_ENCODER_SHARDS = 2


def write_official(out: Path, seed: int = 0) -> None:
    """Writes ``out/FL2VA`` and ``out/Ref2VA``: other transformer weights each, all other parts the same.

    The same seed gives the same bytes. Existing files are replaced.
    """
    encoder = text_encoder_weights(seed)
    video, audio = video_vae_weights(seed), audio_vae_weights(seed)
    for partition, name in PARTITIONS.items():
        folder = out / name
        write_text(folder / "model_index.json", configs.dump(configs.model_index(partition)))
        write_text(folder / "transformer/config.json", configs.dump(configs.TRANSFORMER))
        save_sharded(transformer_weights(seed, partition), folder / "transformer", "model", NUM_TRANSFORMER_SHARDS)
        write_text(folder / "text_encoder/config.json", configs.dump(configs.TEXT_ENCODER))
        save_sharded(encoder, folder / "text_encoder", "model", NUM_TEXT_ENCODER_SHARDS)
        write_tokenizer(folder / "tokenizer")
        write_tokenizer(folder / "processor")
        write_text(folder / "processor/preprocessor_config.json", configs.dump(configs.IMAGE_PROCESSOR))
        write_text(folder / "processor/video_preprocessor_config.json", configs.dump(configs.VIDEO_PROCESSOR))
        write_text(folder / "video_vae/config.json", configs.dump(configs.VIDEO_VAE))
        write_text(folder / "video_vae/source/config.json", configs.dump(configs.VIDEO_VAE_SOURCE))
        save_file(video, folder / "video_vae/source/model.safetensors", metadata={"format": "pt"})
        write_text(folder / "audio_vae/config.json", configs.dump(configs.AUDIO_VAE))
        write_text(folder / "audio_vae/config.yaml", configs.AUDIO_VAE_YAML)
        write_text(folder / "audio_vae/metadata.json", configs.dump(configs.AUDIO_VAE_METADATA))
        save_file(audio, folder / "audio_vae/model.safetensors", metadata={"format": "pt"})


def transformer_weights(seed: int, partition: Partition) -> dict[str, Tensor]:
    """Official tensors of the tiny DiT; fused qkv rows interleaved per head."""
    config = DiTConfig.from_dict(configs.TRANSFORMER, "the tiny transformer config")
    shapes = build(lambda: DiT(config), torch.bfloat16).state_dict()
    shapes |= build(lambda: Modulator(config), torch.bfloat16).state_dict()
    rules = transformer_rules(config.num_attention_heads, config.attention_head_dim)
    return fill(shapes, rules, seed, f"transformer-{partition}")


def text_encoder_weights(seed: int) -> dict[str, Tensor]:
    """Official tensors of the tiny Qwen3-VL, the layers behind the tap, final norm and language head included."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    def make() -> nn.Module:
        return Qwen3VLForConditionalGeneration(Qwen3VLConfig.from_dict(json.loads(configs.dump(configs.TEXT_ENCODER))))

    return fill(build(make, torch.bfloat16).state_dict(), TEXT_ENCODER_RULES, seed, "text_encoder")


def video_vae_weights(seed: int) -> dict[str, Tensor]:
    """Official tensors of the tiny video VAE, float32."""
    config = VideoVAEConfig.from_dicts(configs.VIDEO_VAE, configs.VIDEO_VAE_SOURCE)
    shapes = build(lambda: VideoEncoder(config), torch.float32).state_dict()
    shapes |= build(lambda: VideoDecoder(config), torch.float32).state_dict()
    return fill(shapes, VIDEO_VAE_RULES, seed, "video_vae")


def audio_vae_weights(seed: int) -> dict[str, Tensor]:
    """Official tensors of the tiny audio VAE, float32, weight norm not folded."""
    config = AudioVAEConfig.from_dicts(configs.AUDIO_VAE, configs.AUDIO_VAE_METADATA)
    shapes = build(lambda: AudioEncoder(config), torch.float32).state_dict()
    shapes |= build(lambda: AudioDecoder(config), torch.float32).state_dict()
    return fill(shapes, AUDIO_VAE_RULES, seed, "audio_vae")


def save_sharded(tensors: dict[str, Tensor], folder: Path, stem: str, num_shards: int) -> None:
    """Writes ``{stem}-0000i-of-0000n.safetensors`` and their index; keys in order, shards of about equal size."""
    folder.mkdir(parents=True, exist_ok=True)
    total = sum(tensor.nbytes for tensor in tensors.values())
    shards: list[dict[str, Tensor]] = [{} for _ in range(num_shards)]
    written = 0
    for name, tensor in tensors.items():
        shards[min(written * num_shards // total, num_shards - 1)][name] = tensor
        written += tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"{stem}-{number:05}-of-{num_shards:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_text(folder / f"{stem}.safetensors.index.json", configs.dump(index))


def write_text(path: Path, text: str) -> None:
    """Writes a text file, its folders made where they are missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
