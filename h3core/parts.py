"""The parts of H3 that an engine runs: which checkpoints they come from, and which of them two partitions share."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from comfyui_h3.h3core.checkpoint.official import Checkpoint, find_partitions
from comfyui_h3.h3core.config import PARTITIONS, TRANSFORMERS, EngineConfig, Partition
from comfyui_h3.h3core.errors import CheckpointError, RequestError
from comfyui_h3.h3core.lora.report import LoraReport
from comfyui_h3.h3core.lora.stack import with_loras
from comfyui_h3.h3core.models.dit.attention import AttentionFn
from comfyui_h3.h3core.residency import Source
from comfyui_h3.h3core.types import Task

log = logging.getLogger(__name__)

PARTITION_OF_TASK: Mapping[Task, Partition] = {"t2va": "fl2va", "fl2va": "fl2va", "ref2va": "ref2va"}

_ENTRIES = {  # part -> the component of a checkpoint it is read from, and the config that shapes it
    "text_encoder": ("text_encoder", "text_encoder_config"),
    "dit": ("transformer", "dit_config"),
    "video_encoder": ("video_encoder", "video_vae_config"),
    "video_decoder": ("video_decoder", "video_vae_config"),
    "audio_encoder": ("audio_encoder", "audio_vae_config"),
    "audio_decoder": ("audio_decoder", "audio_vae_config"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """The partitions an engine can run, by name, and why others of the same folder cannot be used.

    loras: what became of the files that are merged into their transformers.
    """

    opened: Mapping[Partition, Checkpoint]
    problems: Mapping[Partition, CheckpointError]
    loras: tuple[LoraReport, ...] = ()

    @classmethod
    def open(cls, config: EngineConfig) -> Checkpoints:
        """The partition a configuration names, or with "auto" all that the folder has, or has but the transformer of,
        where that is given.

        A second one that is still being downloaded does not keep the first from working. Raises CheckpointError when
        none can be used, and RequestError for a layout of a transformer that is not there.
        """
        names: tuple[Partition, ...]
        if config.partition == "auto":
            names = _with_given(find_partitions(config.checkpoint), config)
        else:
            names = (config.partition,)
        opened: dict[Partition, Checkpoint] = {}
        problems: dict[Partition, CheckpointError] = {}
        for name in names:
            try:
                opened[name] = Checkpoint.open(config.checkpoint, name, config.components)
            except CheckpointError as error:
                problems[name] = error
        if not opened:
            raise problems[names[0]]
        for name, problem in problems.items():
            log.warning("the %s weights cannot be used: %s", name, problem)
        return cls(opened=opened, problems=problems)

    def merged(self, loras: Sequence[tuple[Path, float]]) -> Checkpoints:
        """The same with LoRAs in their transformers. Raises as ``with_loras``."""
        opened, reports = with_loras(self.opened, loras)
        return dataclasses.replace(self, opened=opened, loras=reports)

    def describe(self, running: str) -> str:
        """As ``Engine.describe``; running: where and how."""
        first = self.first
        entries = [*first.transformer.entries.values(), *first.modulator.entries.values()]
        summary = (
            f"MiniMax H3 {' and '.join(self.opened)}: {first.dit_config.num_layers} blocks of "
            f"{first.dit_config.hidden_size}, {_count(sum(entry.num_elements for entry in entries))} weights, {running}"
        )
        lines = [line for checkpoint in self.opened.values() for line in checkpoint.describe_layouts(usual=False)]
        return "\n".join([summary, *dict.fromkeys(lines), *(report.describe() for report in self.loras)])

    @property
    def first(self) -> Checkpoint:
        return next(iter(self.opened.values()))

    def of(self, task: Task) -> Checkpoint:
        """The one whose weights a task needs; for what both share, the only one there is."""
        return self.opened.get(PARTITION_OF_TASK[task], self.first)

    def check(self, task: Task) -> None:
        """Raises RequestError, saying which weights the task needs, when they are not here."""
        needed = PARTITION_OF_TASK[task]
        if needed in self.opened:
            return
        if needed in self.problems:
            raise CheckpointError(str(self.problems[needed])) from self.problems[needed]
        if needed == "fl2va":
            made = "text alone" if task == "t2va" else "keyframes"
            raise RequestError(
                f"the ref2va weights need at least one reference, and this is a video from {made}; "
                "choose fl2va, or auto with a folder that has FL2VA/, in Load H3"
            )
        missing = self.first.folder.parent / PARTITIONS["ref2va"]
        if missing.is_dir() and not (missing / "model_index.json").is_file():
            raise RequestError(
                f"references are given, and {missing} has no model_index.json; download the Ref2VA folder, or choose "
                "ref2va in Load H3 to see what it lacks"
            )
        raise RequestError(
            "the fl2va weights make video from text and keyframes, and references are given; "
            "choose ref2va, or auto with a folder that has Ref2VA/, in Load H3"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """sources: by name, one for each set of weights. names: of every part of every partition."""

    sources: Mapping[str, Source]
    names: Mapping[tuple[Partition, str], str]

    @classmethod
    def of(cls, checkpoints: Mapping[Partition, Checkpoint], config: EngineConfig, attend: AttentionFn) -> Parts:
        """A part of the second partition that holds the same weights as the first's is the first's.

        attend: the attention of the transformers.
        """
        sources: dict[str, Source] = {}
        names: dict[tuple[Partition, str], str] = {}
        first = next(iter(checkpoints))
        for partition, checkpoint in checkpoints.items():
            for part, source in _sources(checkpoint, config, attend).items():
                own = part if partition == first else f"{part} of {partition}"
                shared = partition != first and _same(part, checkpoint, checkpoints[first])
                name = names[partition, part] = part if shared else own
                if shared:
                    log.info(
                        "%s of %s holds the same weights as that of %s: one of them is used", part, partition, first
                    )
                sources.setdefault(name, source)
            if partition != first and names[partition, "text_encoder"] != "text_encoder":
                log.warning("%s has a text encoder of its own: it is loaded beside that of %s", partition, first)
        return cls(sources=sources, names=names)


def _with_given(found: tuple[Partition, ...], config: EngineConfig) -> tuple[Partition, ...]:
    """The partitions in a folder, and those whose transformer is given. The usual one is first."""
    given = {source.component: source.path for source in config.components}
    for partition, name in TRANSFORMERS.items():
        if name in given and given[name] is None and partition not in found:
            raise RequestError(
                f"components has a layout for {name}, and {config.checkpoint} has no {partition} weights; "
                "give its file, too, or leave it out"
            )
    return tuple(partition for partition, name in TRANSFORMERS.items() if partition in found or name in given)


def _count(number: int) -> str:
    return f"{number / 1e9:.1f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"


def _same(part: str, one: Checkpoint, other: Checkpoint) -> bool:
    component, config = _ENTRIES[part]
    ours, theirs = getattr(one, component), getattr(other, component)
    return (
        getattr(one, config) == getattr(other, config) and ours.through == theirs.through and ours.same_weights(theirs)
    )


def _sources(checkpoint: Checkpoint, config: EngineConfig, attend: AttentionFn) -> dict[str, Source]:
    device, dtype, vae_dtype = config.torch_device, config.weight_dtype, config.vae_dtype
    return {
        "text_encoder": Source(
            build=lambda: checkpoint.new_text_encoder(dtype),
            load=lambda on_load: checkpoint.load_text_encoder(device, dtype, on_load),
        ),
        "dit": Source(
            build=lambda: checkpoint.new_dit(dtype),
            load=lambda on_load: checkpoint.load_dit(device, dtype, on_load, attend),
        ),
        "video_encoder": Source(
            build=checkpoint.new_video_encoder, load=lambda on_load: checkpoint.load_video_encoder(device, on_load)
        ),
        "video_decoder": Source(
            build=lambda: checkpoint.new_video_decoder(vae_dtype),
            load=lambda on_load: checkpoint.load_video_decoder(device, vae_dtype, on_load),
        ),
        "audio_encoder": Source(
            build=checkpoint.new_audio_encoder, load=lambda on_load: checkpoint.load_audio_encoder(device, on_load)
        ),
        "audio_decoder": Source(
            build=checkpoint.new_audio_decoder, load=lambda on_load: checkpoint.load_audio_decoder(device, on_load)
        ),
    }
