"""A checkpoint in MiniMax's own layout: one folder per partition, one subfolder per component.

``Checkpoint.open`` reads configs and shard headers only, so a wrong or incomplete folder is refused in a moment, before
any weight is read. The ``load_*`` methods then stream one component each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from comfyui_h3.h3core.checkpoint import keymap, loader
from comfyui_h3.h3core.checkpoint.index import TensorEntry, read_index, read_json
from comfyui_h3.h3core.checkpoint.keymap import KeyMap
from comfyui_h3.h3core.config import PARTITIONS, Partition
from comfyui_h3.h3core.errors import CheckpointError, H3Error
from comfyui_h3.h3core.models.audio_vae.config import AudioVAEConfig
from comfyui_h3.h3core.models.audio_vae.decoder import AudioDecoder
from comfyui_h3.h3core.models.audio_vae.encoder import AudioEncoder
from comfyui_h3.h3core.models.dit.adaln import Modulation, Modulator, Resident
from comfyui_h3.h3core.models.dit.attention import AttentionFn, sdpa
from comfyui_h3.h3core.models.dit.config import DiTConfig
from comfyui_h3.h3core.models.dit.model import DiT
from comfyui_h3.h3core.models.fields import is_positive
from comfyui_h3.h3core.models.precision import exact_fp32
from comfyui_h3.h3core.models.text_encoder.config import TextEncoderConfig
from comfyui_h3.h3core.models.text_encoder.encoder import TextEncoder
from comfyui_h3.h3core.models.text_encoder.template import Presenter
from comfyui_h3.h3core.models.text_encoder.vision import PixelLimits
from comfyui_h3.h3core.models.video_vae.config import VideoVAEConfig
from comfyui_h3.h3core.models.video_vae.decoder import VideoDecoder
from comfyui_h3.h3core.models.video_vae.encoder import VideoEncoder
from comfyui_h3.h3core.types import Progress

RELEASE_SHIFTS = {"video": 12.0, "audio": 3.0}  # where model_index.json has none

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """What is read of one component: where it is, its tensors by key, and how keys and rows become parameters."""

    folder: Path
    entries: Mapping[str, TensorEntry]
    keymap: KeyMap

    @classmethod
    def open(cls, folder: Path, keys: KeyMap) -> Component:
        """Reads headers: of the index's shards, or of the only file. Raises CheckpointError as ``read_index`` does."""
        return cls(folder=folder, entries=read_index(folder, keys.is_read), keymap=keys)

    @property
    def num_bytes(self) -> int:
        """Bytes of what is read, as stored."""
        return sum(entry.num_bytes for entry in self.entries.values())

    def check(self, module: nn.Module) -> None:
        """Raises CheckpointError unless names and shapes are those of ``module``."""
        loader.check(module, self.entries, self.folder)

    def fill(self, module: M, device: torch.device, on_load: Progress | None) -> M:
        """``module``, built on meta, with its weights, on ``device``."""
        return loader.load(module, self.entries, self.folder, self.reader(device, on_load))

    def stream(self, module: nn.Module, device: torch.device, on_load: Progress | None) -> Resident:
        """For ``module``, built on meta: its weights on ``device``, those under one prefix at a time."""
        return loader.stream(module, self.entries, self.folder, self.reader(device, on_load))

    def reader(self, device: torch.device, on_load: Progress | None) -> loader.Read:
        """Reads the component's tensors from its files."""
        return loader.Reader(entries=self.entries, keymap=self.keymap, device=device, on_load=on_load)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One partition: its folder, configs, and checked components."""

    folder: Path
    partition: Partition
    video_shift: float
    audio_shift: float
    dit_config: DiTConfig
    text_encoder_config: TextEncoderConfig
    video_vae_config: VideoVAEConfig
    audio_vae_config: AudioVAEConfig
    transformer: Component
    modulator: Component
    text_encoder: Component
    video_encoder: Component
    video_decoder: Component
    audio_encoder: Component
    audio_decoder: Component

    @classmethod
    def open(cls, root: Path, partition: Partition) -> Checkpoint:
        """Opens ``root/FL2VA`` or ``root/Ref2VA``, or ``root`` itself when it is that folder.

        Raises CheckpointError, naming files, keys and shapes, when anything is missing, cut short or does not fit.
        """
        folder = partition_folder(root, partition)
        release = read_json(folder / "model_index.json").get("_minimax_h3")
        if not isinstance(release, dict):
            raise CheckpointError(
                f"{folder / 'model_index.json'} has no _minimax_h3 section; not an official H3 folder"
            )
        if release.get("partition") != partition:
            raise CheckpointError(
                f"{folder} holds the {release.get('partition')!r} weights, but {partition!r} was asked for; "
                "choose the other weights, or the other folder"
            )
        shifts = release.get("sigma_shift_scales", RELEASE_SHIFTS)
        if not isinstance(shifts, dict) or not all(is_positive(shifts.get(stream)) for stream in RELEASE_SHIFTS):
            raise CheckpointError(
                f"{folder / 'model_index.json'}: sigma_shift_scales={shifts!r} is not like {RELEASE_SHIFTS}"
            )
        transformer, text_encoder = folder / "transformer", folder / "text_encoder"
        video_vae, audio_vae = folder / "video_vae", folder / "audio_vae"
        dit_config = DiTConfig.from_dict(
            read_json(transformer / "config.json"), source=str(transformer / "config.json")
        )
        text_encoder_config = TextEncoderConfig.from_dict(
            read_json(text_encoder / "config.json"),
            source=str(text_encoder / "config.json"),
            tap=release.get("text_encoder_tap"),
        )
        checkpoint = cls(
            folder=folder,
            partition=partition,
            video_shift=float(shifts["video"]),
            audio_shift=float(shifts["audio"]),
            dit_config=dit_config,
            text_encoder_config=text_encoder_config,
            video_vae_config=VideoVAEConfig.from_dicts(
                read_json(video_vae / "config.json"), read_json(video_vae / "source" / "config.json")
            ),
            audio_vae_config=AudioVAEConfig.from_dicts(
                read_json(audio_vae / "config.json"), read_json(audio_vae / "metadata.json")
            ),
            transformer=Component.open(
                transformer, keymap.official_dit(dit_config.num_attention_heads, dit_config.attention_head_dim)
            ),
            modulator=Component.open(transformer, keymap.official_modulator()),
            text_encoder=Component.open(
                text_encoder,
                keymap.official_text_encoder(text_encoder_config.tap, text_encoder_config.num_file_layers),
            ),
            video_encoder=Component.open(video_vae / "source", keymap.half(("encoder.", "quant_conv."))),
            video_decoder=Component.open(video_vae / "source", keymap.half(("post_quant_conv.", "decoder."))),
            audio_encoder=Component.open(
                audio_vae, keymap.half(("encoder.", "pre_block.", "mean_proj.", "logs_proj."))
            ),
            audio_decoder=Component.open(audio_vae, keymap.half(("dec_in_proj.", "decoder."))),
        )
        read_json(folder / "tokenizer" / "tokenizer_config.json")  # what is missing is told now, not after a stage
        checkpoint.load_pixel_limits()
        checkpoint._check_sizes_fit()
        checkpoint._check_weights()
        return checkpoint

    def _check_sizes_fit(self) -> None:
        """The widths at which components meet."""
        pairs = (
            ("text_dim of the transformer", self.dit_config.text_dim, self.text_encoder_config.hidden_size),
            ("latents_dim of the transformer", self.dit_config.latents_dim, len(self.video_vae_config.latents_mean)),
            (
                "audio_latents_dim of the transformer",
                self.dit_config.audio_latents_dim,
                self.audio_vae_config.latent_channels,
            ),
        )
        for name, wanted, found in pairs:
            if wanted != found:
                raise CheckpointError(f"{self.folder}: {name} is {wanted}, the other component gives {found}")

    def _check_weights(self) -> None:
        """Names and shapes of every tensor that will be read."""
        self.transformer.check(self.new_dit(torch.bfloat16))
        self.modulator.check(self.new_modulator(torch.bfloat16))
        self.text_encoder.check(self.new_text_encoder(torch.bfloat16))
        self.video_encoder.check(self.new_video_encoder())
        self.video_decoder.check(self.new_video_decoder(torch.float32))
        self.audio_encoder.check(self.new_audio_encoder())
        self.audio_decoder.check(self.new_audio_decoder())

    def new_dit(self, dtype: torch.dtype, attend: AttentionFn = sdpa) -> DiT:
        """The DiT on meta."""
        return loader.build(lambda: DiT(self.dit_config, attend), dtype)

    def new_modulator(self, dtype: torch.dtype) -> Modulator:
        """The part of the transformer that sees timesteps only, on meta."""
        return loader.build(lambda: Modulator(self.dit_config), dtype)

    def new_text_encoder(self, dtype: torch.dtype) -> TextEncoder:
        """The encoder up to its tap, on meta."""
        try:
            return loader.build(lambda: TextEncoder(self.text_encoder_config), dtype)
        except H3Error:
            raise
        except Exception as error:
            # transformers builds it, and says of an impossible size whatever Python says where it first hurts.
            raise CheckpointError(
                f"{self.text_encoder.folder / 'config.json'} is not a config transformers can build ({error!r}); "
                "take the file of the release"
            ) from error

    def new_video_encoder(self) -> VideoEncoder:
        """Encoder half of the video VAE on meta, float32."""
        return loader.build(lambda: VideoEncoder(self.video_vae_config), torch.float32)

    def new_video_decoder(self, dtype: torch.dtype) -> VideoDecoder:
        """Decoder half of the video VAE on meta, its matrix products in ``dtype``."""
        module = loader.build(lambda: VideoDecoder(self.video_vae_config), torch.float32)
        return module.to_compute_dtype(dtype)

    def new_audio_encoder(self) -> AudioEncoder:
        """Encoder half of the audio VAE on meta, float32."""
        return loader.build(lambda: AudioEncoder(self.audio_vae_config), torch.float32)

    def new_audio_decoder(self) -> AudioDecoder:
        """Decoder half of the audio VAE on meta, float32."""
        return loader.build(lambda: AudioDecoder(self.audio_vae_config), torch.float32)

    def load_dit(
        self,
        device: torch.device,
        dtype: torch.dtype,
        on_load: Progress | None = None,
        attend: AttentionFn = sdpa,
    ) -> DiT:
        """The DiT on ``device``."""
        return self.transformer.fill(self.new_dit(dtype, attend), device, on_load)

    def read_modulation(
        self,
        groups: Sequence[Tensor],
        device: torch.device,
        dtype: torch.dtype,
        on_load: Progress | None = None,
    ) -> Modulation:
        """The tables of groups of timesteps (M,) float32, on ``device``. Reads two fifths of the transformer for them,
        of which it holds one layer at a time."""
        modulator = self.new_modulator(dtype)
        resident = self.modulator.stream(modulator, device, on_load)
        with exact_fp32():
            return modulator([timesteps.to(device) for timesteps in groups], resident)

    def load_text_encoder(
        self, device: torch.device, dtype: torch.dtype, on_load: Progress | None = None
    ) -> TextEncoder:
        """The encoder up to its tap, on ``device``; shards that hold only later layers are not opened."""
        module = self.text_encoder.fill(self.new_text_encoder(dtype), device, on_load)
        module.reset_rotary_frequencies(device)
        return module

    def load_presenter(self) -> Presenter:
        """The tokenizer with the release's rules."""
        return Presenter.from_folder(self.folder / "tokenizer", self.text_encoder_config.vocab_size)

    def load_pixel_limits(self) -> PixelLimits:
        """How large the encoder takes pictures and clips, from the processor's files."""
        return PixelLimits.from_folder(self.folder / "processor")

    def load_video_encoder(self, device: torch.device, on_load: Progress | None = None) -> VideoEncoder:
        """Encoder half of the video VAE, float32."""
        return self.video_encoder.fill(self.new_video_encoder(), device, on_load)

    def load_video_decoder(
        self, device: torch.device, dtype: torch.dtype, on_load: Progress | None = None
    ) -> VideoDecoder:
        """Decoder half of the video VAE, its matrix products in ``dtype``."""
        return self.video_decoder.fill(self.new_video_decoder(dtype), device, on_load)

    def load_audio_encoder(self, device: torch.device, on_load: Progress | None = None) -> AudioEncoder:
        """Encoder half of the audio VAE, float32, weight norm folded."""
        module = self.audio_encoder.fill(self.new_audio_encoder(), device, on_load)
        module.fold_weight_norm()
        return module

    def load_audio_decoder(self, device: torch.device, on_load: Progress | None = None) -> AudioDecoder:
        """Decoder half of the audio VAE, float32, weight norm folded."""
        module = self.audio_decoder.fill(self.new_audio_decoder(), device, on_load)
        module.fold_weight_norm()
        return module


def find_partitions(root: Path) -> tuple[Partition, ...]:
    """Which partitions are in a folder, which may be one itself. Raises CheckpointError when there is none."""
    found = tuple(name for name, folder in PARTITIONS.items() if (root / folder / "model_index.json").is_file())
    if found:
        return found
    # One partition itself, whose file says which; or nothing, which is the error of looking for the usual one.
    release = read_json(partition_folder(root, "fl2va") / "model_index.json").get("_minimax_h3")
    named = release.get("partition") if isinstance(release, dict) else None
    return ("ref2va",) if named == "ref2va" else ("fl2va",)


def partition_folder(root: Path, partition: Partition) -> Path:
    """Where a partition lies below ``root``. Raises CheckpointError saying what was looked for and what is there."""
    try:
        return _partition_folder(root, partition)
    except OSError as error:
        raise CheckpointError(f"{root} cannot be read ({error.strerror}: {error.filename})") from error


def _partition_folder(root: Path, partition: Partition) -> Path:
    if not root.is_dir():
        raise CheckpointError(f"{root} is not a folder; give the folder that holds FL2VA/ and Ref2VA/")
    name = PARTITIONS[partition]
    if (root / name / "model_index.json").is_file():
        return root / name
    if (root / "model_index.json").is_file() and (root / "transformer").is_dir():
        return root
    others = [other for other in PARTITIONS.values() if (root / other).is_dir()]
    found = f"it has only {others[0]}/" if others and name not in others else "it has no complete checkpoint"
    raise CheckpointError(f"{root} has no {name}/model_index.json ({found}); download the {name} folder of MiniMax-H3")
