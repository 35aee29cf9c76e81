"""LoRAs on an opened checkpoint: the same checkpoint, whose transformer is merged with them when it is read."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from comfyui_h3.h3core.checkpoint.index import some_of
from comfyui_h3.h3core.checkpoint.official import Checkpoint
from comfyui_h3.h3core.config import Partition
from comfyui_h3.h3core.lora.file import LoraFile
from comfyui_h3.h3core.lora.merge import Merge
from comfyui_h3.h3core.lora.patches import Base, check_applied, plan
from comfyui_h3.h3core.lora.report import LoraReport

log = logging.getLogger(__name__)


def with_loras(
    checkpoints: Mapping[Partition, Checkpoint], loras: Sequence[tuple[Path, float]]
) -> tuple[dict[Partition, Checkpoint], tuple[LoraReport, ...]]:
    """Checkpoints that read merged weights, and what became of each file's keys; reads headers only.

    Of several partitions the report is of the one that a file changes most. Raises CheckpointError for a damaged file,
    RequestError for one that is not a LoRA or changes nothing.
    """
    if not loras:
        return dict(checkpoints), ()
    files = [(LoraFile.open(path), strength) for path, strength in loras]
    merged: dict[Partition, Checkpoint] = {}
    reports: list[dict[str, LoraReport]] = [{} for _ in files]
    for partition, checkpoint in checkpoints.items():
        base = _base(checkpoint)
        planned = [plan(file, strength, base) for file, strength in files]
        for of_partition, one in zip(reports, planned, strict=True):
            of_partition[partition] = one.report
        merge = Merge.of(planned, base)
        merged[partition] = dataclasses.replace(
            checkpoint,
            transformer=dataclasses.replace(checkpoint.transformer, through=merge),
            modulator=dataclasses.replace(checkpoint.modulator, through=merge),
        )
    for of_partition in reports:
        check_applied(of_partition)
    best = tuple(max(of_partition.values(), key=lambda report: len(report.applied)) for of_partition in reports)
    for report in best:
        _log(report)
    return merged, best


def _base(checkpoint: Checkpoint) -> Base:
    tensors = checkpoint.new_dit(torch.bfloat16).state_dict() | checkpoint.new_modulator(torch.bfloat16).state_dict()
    return Base(
        shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
        num_heads=checkpoint.dit_config.num_attention_heads,
        head_dim=checkpoint.dit_config.attention_head_dim,
        is_ref2va=checkpoint.partition == "ref2va",
    )


def _log(report: LoraReport) -> None:
    log.info("%s", report.describe())
    if report.failed:
        failed = [f"{one.key} ({one.reason})" for one in report.failed]
        log.warning("%s: not merged: %s", report.path, some_of(failed, most=10))
    if report.ignored:
        log.info("%s: no parameters of the transformer: %s", report.path, some_of(list(report.ignored), most=10))
