"""One partition of a checkpoint: MiniMax's own folder, or diffusers', each component there or in another file.

``Checkpoint.open`` reads configs and shard headers only (of a file that does not say how its qkv rows are ordered, some
of these), so a wrong or incomplete folder is refused in a moment. The ``load_*`` methods then stream one component
each.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from comfyui_h3.h3core.checkpoint import keymap, layouts, loader
from comfyui_h3.h3core.checkpoint.diffusers_folder import diffusers_partitions, diffusers_sources, is_diffusers_folder
from comfyui_h3.h3core.checkpoint.index import TensorEntry, read_entries, read_json
from comfyui_h3.h3core.checkpoint.keymap import KeyMap
from comfyui_h3.h3core.checkpoint.latent_statistics import check_latent_statistics
from comfyui_h3.h3core.checkpoint.layouts import Layout
from comfyui_h3.h3core.checkpoint.renamed import parameters, renaming
from comfyui_h3.h3core.checkpoint.sampled import same_weights
from comfyui_h3.h3core.checkpoint.sources import Sources, official_sources
from comfyui_h3.h3core.config import PARTITIONS, TRANSFORMERS, ComponentSource, Partition
from comfyui_h3.h3core.errors import CheckpointError, H3Error
from comfyui_h3.h3core.models.audio_vae.config import AudioVAEConfig
from comfyui_h3.h3core.models.audio_vae.decoder import AudioDecoder
from comfyui_h3.h3core.models.audio_vae.encoder import AudioEncoder
from comfyui_h3.h3core.models.dit.adaln import Modulation, Modulator, Resident
from comfyui_h3.h3core.models.dit.attention import AttentionFn, sdpa
from comfyui_h3.h3core.models.dit.config import DiTConfig
from comfyui_h3.h3core.models.dit.model import DiT
from comfyui_h3.h3core.models.precision import exact_fp32
from comfyui_h3.h3core.models.text_encoder.config import TextEncoderConfig
from comfyui_h3.h3core.models.text_encoder.encoder import TextEncoder
from comfyui_h3.h3core.models.text_encoder.template import Presenter
from comfyui_h3.h3core.models.text_encoder.vision import PixelLimits
from comfyui_h3.h3core.models.video_vae.config import VideoVAEConfig
from comfyui_h3.h3core.models.video_vae.decoder import VideoDecoder
from comfyui_h3.h3core.models.video_vae.encoder import VideoEncoder
from comfyui_h3.h3core.types import Progress

log = logging.getLogger(__name__)

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """What is read of one component: where it is, and how its files become parameters.

    folder: or the one file. entries: by parameter; stored: by key of the files, where these differ from parameters.
    through: what every reading of weights goes through on its way, as the merging of LoRAs; None for nothing.
    """

    folder: Path
    entries: Mapping[str, TensorEntry]
    keymap: KeyMap
    stored: Mapping[str, TensorEntry] = field(default_factory=dict)
    through: Callable[[loader.Read], loader.Read] | None = None

    @classmethod
    def open(cls, folder: Path, keys: KeyMap) -> Component:
        """Reads headers: of the index's shards, or of the only file. Raises CheckpointError as ``read_entries`` does,
        and when parts of a parameter are missing."""
        stored = read_entries(folder, keys.is_read)
        return cls(folder=folder, entries=parameters(stored, keys, folder), keymap=keys, stored=stored)

    @property
    def num_bytes(self) -> int:
        """Bytes of what is read, as stored."""
        return sum(entry.num_bytes for entry in self.entries.values())

    def same_weights(self, other: Component) -> bool:
        """Whether files and their reading are the same, by a sample of rows; see ``sampled.same_weights``."""
        rows = [[(key, keys.order(key) is None) for key in self.stored] for keys in (self.keymap, other.keymap)]
        return rows[0] == rows[1] and same_weights(self.stored, other.stored)

    def check(self, module: nn.Module) -> None:
        """Raises CheckpointError unless names and shapes are those of ``module``."""
        loader.check(module, self.entries, self.folder, float16=self.keymap.float16)

    def fill(self, module: M, device: torch.device, on_load: Progress | None) -> M:
        """``module``, built on meta, with its weights, on ``device``."""
        read = self.reader(device, on_load)
        return loader.load(module, self.entries, self.folder, read, float16=self.keymap.float16)

    def stream(self, module: nn.Module, device: torch.device, on_load: Progress | None) -> Resident:
        """For ``module``, built on meta: its weights on ``device``, those under one prefix at a time."""
        return loader.stream(module, self.entries, self.folder, self.reader(device, on_load))

    def reader(self, device: torch.device, on_load: Progress | None) -> loader.Read:
        """Reads the component's parameters from its files."""
        read: loader.Read = loader.Reader(entries=self.stored, keymap=self.keymap, device=device, on_load=on_load)
        read = renaming(read, self.stored, self.keymap, device)
        return read if self.through is None else self.through(read)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One partition: its folder, configs, and checked components.

    found: by component, its files and their layout.
    """

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
    found: Mapping[str, tuple[Path, Layout]] = field(default_factory=dict)

    @classmethod
    def open(cls, root: Path, partition: Partition, components: Sequence[ComponentSource] = ()) -> Checkpoint:
        """Opens ``root/FL2VA`` or ``root/Ref2VA``, or ``root`` itself when it is that folder or one of diffusers.

        components: those that are somewhere else, or in a layout that files do not say; all else is found out. With a
        transformer from somewhere else the other partition's folder will do: all but the transformers is the same.
        Raises CheckpointError, naming files, keys and shapes, when anything is missing, cut short or does not fit.
        """
        given = {source.component: source for source in components}
        own = given.get(TRANSFORMERS[partition])
        sources = _sources(root, partition, has_transformer=own is not None and own.path is not None)
        paths, asked = {}, {}
        for name in ("transformer", "text_encoder", "video_vae", "audio_vae"):
            source = own if name == "transformer" else given.get(name)
            paths[name] = (source and source.path) or getattr(sources, name)
            asked[name] = source.layout if source else "auto"
        _check_partition_of_name(paths["transformer"], partition)
        dit, text = sources.dit_config, sources.text_encoder_config
        video, audio = sources.video_vae_config, sources.audio_vae_config
        found = {
            "transformer": layouts.transformer_layout(paths["transformer"], asked["transformer"], dit),
            "text_encoder": layouts.text_encoder_layout(paths["text_encoder"], asked["text_encoder"]),
            "video_vae": layouts.video_vae_layout(paths["video_vae"], asked["video_vae"]),
            "audio_vae": layouts.audio_vae_layout(paths["audio_vae"], asked["audio_vae"]),
        }
        dit_keys = layouts.transformer_keymap(found["transformer"], dit)
        video_keys = layouts.video_vae_keymap(found["video_vae"], video)
        audio_keys = layouts.audio_vae_keymap(found["audio_vae"])
        checkpoint = cls(
            folder=sources.folder,
            partition=partition,
            video_shift=sources.video_shift,
            audio_shift=sources.audio_shift,
            dit_config=dit,
            text_encoder_config=text,
            video_vae_config=video,
            audio_vae_config=audio,
            transformer=Component.open(paths["transformer"], dit_keys),
            modulator=Component.open(paths["transformer"], keymap.modulator(dit_keys)),
            text_encoder=Component.open(
                paths["text_encoder"], layouts.text_encoder_keymap(found["text_encoder"], text)
            ),
            video_encoder=Component.open(paths["video_vae"], keymap.half(("encoder.", "quant_conv."), video_keys)),
            video_decoder=Component.open(paths["video_vae"], keymap.half(("post_quant_conv.", "decoder."), video_keys)),
            audio_encoder=Component.open(
                paths["audio_vae"],
                keymap.half(("encoder.", "pre_block.", "mean_proj.", "logs_proj."), audio_keys),
            ),
            audio_decoder=Component.open(paths["audio_vae"], keymap.half(("dec_in_proj.", "decoder."), audio_keys)),
            found={name: (paths[name], layout) for name, layout in found.items()},
        )
        folder = sources.folder
        read_json(folder / "tokenizer" / "tokenizer_config.json")  # what is missing is told now, not after a stage
        checkpoint.load_pixel_limits()
        checkpoint._check_sizes_fit()
        checkpoint._check_weights()
        check_latent_statistics(paths["video_vae"], video)
        check_latent_statistics(paths["audio_vae"], audio)
        for line in checkpoint.describe_layouts():
            log.info("%s %s", partition, line)
        return checkpoint

    def describe_layouts(self, *, usual: bool = True) -> list[str]:
        """A line for each component: its file or folder, its layout, and how that was found.

        usual: also those in the release's layout and in the checkpoint's folder.
        """
        return [
            f"{name} from {path}: {layout.describe()}"
            for name, (path, layout) in self.found.items()
            if usual or layout.name != "official" or not path.is_relative_to(self.folder)
        ]

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
                f"{self.folder / 'text_encoder' / 'config.json'} is not a config transformers can build ({error!r}); "
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
        """Encoder half of the audio VAE on meta, float32, its weight norm folded where the files have it so."""
        module = loader.build(lambda: AudioEncoder(self.audio_vae_config), torch.float32)
        if self.audio_encoder.keymap.folded:
            module.fold_weight_norm()
        return module

    def new_audio_decoder(self) -> AudioDecoder:
        """Decoder half of the audio VAE on meta, float32, its weight norm folded where the files have it so."""
        module = loader.build(lambda: AudioDecoder(self.audio_vae_config), torch.float32)
        if self.audio_decoder.keymap.folded:
            module.fold_weight_norm()
        return module

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
    if is_diffusers_folder(root) and (found := diffusers_partitions(root)):
        return found
    # One partition itself, whose file says which; or nothing, which is the error of looking for the usual one.
    release = read_json(partition_folder(root, "fl2va") / "model_index.json").get("_minimax_h3")
    named = release.get("partition") if isinstance(release, dict) else None
    return ("ref2va",) if named == "ref2va" else ("fl2va",)


def _sources(root: Path, partition: Partition, *, has_transformer: bool) -> Sources:
    """The release's folders before diffusers', where both lie beside each other.

    has_transformer: from somewhere else, so that a folder of the other partition serves where this one's is not there.
    """
    if has_transformer and partition not in (found := find_partitions(root)):
        partition = found[0]
    if not (root / PARTITIONS[partition] / "model_index.json").is_file() and is_diffusers_folder(root):
        return diffusers_sources(root, partition)
    return official_sources(partition_folder(root, partition), partition)


def _check_partition_of_name(file: Path, partition: Partition) -> None:
    """Raises CheckpointError for a file whose name is of the other partition alone: both have the same keys."""
    if file.is_dir():
        return
    named = [name for name in PARTITIONS if re.search(name, file.name, re.IGNORECASE)]
    if named and partition not in named:
        raise CheckpointError(
            f"{file} is the {named[0]} transformer by its name, and {partition} was asked for; choose the other file, "
            "or the other weights"
        )


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
