"""H3 at its released sizes with random weights: what a benchmark runs where there is no checkpoint.

Names, shapes and dtypes are those of the release, and the engine reads them in its usual way, tensor by tensor; only
the tensors come from a generator on the device and not from files. The tokenizer is the tiny H3's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comfyui_h3.benchmarks.media import FULL_SIZE, FULL_SIZE_SOUND
from comfyui_h3.benchmarks.vae_decode import FULL_SIZE as FULL_SIZE_DECODER
from comfyui_h3.h3core.checkpoint.index import TensorEntry
from comfyui_h3.h3core.checkpoint.keymap import KeyMap
from comfyui_h3.h3core.checkpoint.loader import Read, build
from comfyui_h3.h3core.checkpoint.official import Checkpoint, Component
from comfyui_h3.h3core.checkpoint.sources import RELEASE_SHIFTS
from comfyui_h3.h3core.models.audio_vae.config import AudioVAEConfig
from comfyui_h3.h3core.models.audio_vae.decoder import AudioDecoder
from comfyui_h3.h3core.models.audio_vae.encoder import AudioEncoder
from comfyui_h3.h3core.models.audio_vae.filters import kaiser_sinc_filter
from comfyui_h3.h3core.models.dit.adaln import Modulator
from comfyui_h3.h3core.models.dit.config import DiTConfig
from comfyui_h3.h3core.models.dit.model import DiT
from comfyui_h3.h3core.models.text_encoder.config import RELEASE_TAP, TextEncoderConfig
from comfyui_h3.h3core.models.text_encoder.encoder import TextEncoder
from comfyui_h3.h3core.models.video_vae.config import VideoVAEConfig
from comfyui_h3.h3core.models.video_vae.decoder import VideoDecoder
from comfyui_h3.h3core.models.video_vae.encoder import VideoEncoder
from comfyui_h3.h3core.parts import Checkpoints
from comfyui_h3.h3core.tiny import configs
from comfyui_h3.h3core.tiny.write import write_official
from comfyui_h3.h3core.types import Progress

TEXT_SIZES: dict[str, Any] = {
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    "vocab_size": 151936,
}
VISION_SIZES: dict[str, Any] = {
    "deepstack_visual_indexes": [8, 16, 24],
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 5120,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomComponent(Component):
    """A component whose tensors are made when they are asked for."""

    @classmethod
    def of(cls, make: Callable[[], nn.Module], dtype: torch.dtype) -> RandomComponent:
        """With the names, shapes and dtypes of a module."""
        entries = {
            name: TensorEntry(file=Path("random"), shape=tuple(tensor.shape), dtype=tensor.dtype, stamp=(0, 0))
            for name, tensor in build(make, dtype).state_dict().items()
        }
        return cls(folder=Path("random"), entries=entries, keymap=KeyMap())

    def reader(self, device: torch.device, on_load: Progress | None) -> Read:
        generator = torch.Generator(device).manual_seed(0)

        def read(names: Iterable[str], dtypes: Mapping[str, torch.dtype]) -> Iterator[tuple[str, Tensor]]:
            for name in names:
                tensor = torch.empty(self.entries[name].shape, dtype=dtypes[name], device=device)
                yield name, fill(name, tensor, generator)

        return read


def fill(name: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
    """A value that keeps activations of about unit size, none of them zero: products with zeros cost less power."""
    if name.endswith("inv_freq"):
        return tensor.copy_(10000.0 ** (-torch.arange(len(tensor), device=tensor.device) / len(tensor)))
    if name.endswith(".filter"):
        return tensor.copy_(kaiser_sinc_filter())
    if name.endswith("original0"):  # lengths of weights with norm
        return tensor.normal_(0.72, 0.1, generator=generator)
    if "norm" in name and name.endswith("weight"):
        return tensor.normal_(1, 0.1, generator=generator)
    if "adaln_proj" in name:
        return tensor.normal_(0, 0.3 * tensor.shape[-1] ** -0.5, generator=generator)
    if tensor.ndim > 1:
        return tensor.normal_(0, tensor[0].numel() ** -0.5, generator=generator)
    return tensor.normal_(0.5 if "scale" in name else 0, 0.03, generator=generator)


def full_size_checkpoints(folder: Path) -> Checkpoints:
    """FL2VA at its released sizes; the files of its tokenizer are written into ``folder``."""
    write_official(folder)
    dit = DiTConfig()
    encoder = configs.TEXT_ENCODER | {
        "text_config": configs.TEXT_ENCODER["text_config"] | TEXT_SIZES,
        "vision_config": configs.TEXT_ENCODER["vision_config"] | VISION_SIZES,
    }
    text = TextEncoderConfig.from_dict(encoder, "the released sizes", tap=RELEASE_TAP)
    # The embeddings are the release's, of which the tokenizer at hand reaches the first few hundred.
    text = dataclasses.replace(text, vocab_size=configs.VOCAB_SIZE)
    decoder = configs.VIDEO_VAE_SOURCE["vit_decoder_kwargs"] | FULL_SIZE_DECODER
    source = configs.VIDEO_VAE_SOURCE | FULL_SIZE | {"vit_decoder_kwargs": decoder}
    video = VideoVAEConfig.from_dicts(configs.VIDEO_VAE, source)
    kwargs = configs.AUDIO_VAE_METADATA["metadata"]["kwargs"] | FULL_SIZE_SOUND
    audio = AudioVAEConfig.from_dicts(configs.AUDIO_VAE, {"metadata": {"kwargs": kwargs}})
    checkpoint = Checkpoint(
        folder=folder / "FL2VA",
        partition="fl2va",
        video_shift=RELEASE_SHIFTS["video"],
        audio_shift=RELEASE_SHIFTS["audio"],
        dit_config=dit,
        text_encoder_config=text,
        video_vae_config=video,
        audio_vae_config=audio,
        transformer=RandomComponent.of(lambda: DiT(dit), torch.bfloat16),
        modulator=RandomComponent.of(lambda: Modulator(dit), torch.bfloat16),
        text_encoder=RandomComponent.of(lambda: TextEncoder(text), torch.bfloat16),
        video_encoder=RandomComponent.of(lambda: VideoEncoder(video), torch.float32),
        video_decoder=RandomComponent.of(lambda: VideoDecoder(video), torch.float32),
        audio_encoder=RandomComponent.of(lambda: AudioEncoder(audio), torch.float32),
        audio_decoder=RandomComponent.of(lambda: AudioDecoder(audio), torch.float32),
    )
    return Checkpoints(opened={"fl2va": checkpoint}, problems={})
