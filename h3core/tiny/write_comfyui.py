"""The tiny H3 as single files, as ComfyUI names them: the same weights, one file a component."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from comfyui_h3.h3core.config import PARTITIONS, Partition
from comfyui_h3.h3core.tiny import configs
from comfyui_h3.h3core.tiny.write import (
    audio_vae_weights,
    text_encoder_weights,
    transformer_weights,
    video_vae_weights,
)

PREFIX = "model.diffusion_model."


def write_comfyui(out: Path, seed: int = 0) -> None:
    """Writes one file per component below ``diffusion_models``, ``text_encoders`` and ``vae`` of ``out``.

    Configs and tokenizer are not in them: they open beside a folder in another layout.
    """
    for partition in PARTITIONS:
        save(transformer_file(seed, partition), out / f"diffusion_models/tiny_h3_{partition}_bf16.safetensors")
    save(text_encoder_file(seed), out / "text_encoders/tiny_h3_text_encoder_bf16.safetensors")
    save(video_vae_file(seed), out / "vae/tiny_h3_video_vae_fp32.safetensors")
    save(audio_vae_file(seed), out / "vae/tiny_h3_audio_vae_fp32.safetensors")


def transformer_file(
    seed: int, partition: Partition, *, prefix: str = "", interleaved: bool = False
) -> dict[str, Tensor]:
    """Official names behind ``prefix``; fused qkv rows stacked, unless the file keeps those of the release."""
    heads, dim = configs.TRANSFORMER["num_attention_heads"], configs.TRANSFORMER["attention_head_dim"]
    out = {}
    for name, tensor in transformer_weights(seed, partition).items():
        if name.endswith(".attn.qkv_proj.weight") and not interleaved:
            rows = tensor.unflatten(0, (heads, 3, dim))
            tensor = torch.cat([rows[:, part].flatten(0, 1) for part in range(3)])
        out[prefix + name] = tensor
    return out


def text_encoder_file(seed: int) -> dict[str, Tensor]:
    """The decoder directly below ``model`` up to the tap, the vision tower beside it; no norm, no head."""
    out = {}
    for name, tensor in text_encoder_weights(seed).items():
        name = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        behind_tap = any(name.startswith(f"model.layers.{layer}.") for layer in _layers_behind_tap())
        if not behind_tap and name not in ("lm_head.weight", "model.norm.weight"):
            out[name] = tensor
    return out


def video_vae_file(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Official names, and the statistics of the latents."""
    tensors = {name: tensor.to(dtype) for name, tensor in video_vae_weights(seed).items()}
    return tensors | _statistics(configs.VIDEO_VAE)


def audio_vae_file(seed: int) -> dict[str, Tensor]:
    """Official names, length and direction of each weight folded into it, and the statistics of the latents."""
    tensors = audio_vae_weights(seed)
    length, direction = ".parametrizations.weight.original0", ".parametrizations.weight.original1"
    out = {}
    for name, tensor in tensors.items():
        if name.endswith(length):
            module = name.removesuffix(length)
            out[f"{module}.weight"] = torch._weight_norm(tensors[module + direction], tensor, 0)
        elif not name.endswith(direction):
            out[name] = tensor
    return out | _statistics(configs.AUDIO_VAE)


def save(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Writes one file, its folder made where it is missing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})


def _layers_behind_tap() -> range:
    return range(configs.TAP, configs.TEXT_ENCODER["text_config"]["num_hidden_layers"])


def _statistics(config: Mapping[str, list[float]]) -> dict[str, Tensor]:
    return {name: torch.tensor(config[name]) for name in ("latents_mean", "latents_std")}
