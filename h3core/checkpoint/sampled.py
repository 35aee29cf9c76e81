"""Whether two components hold the same weights, from a sample: both partitions of a release share most parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from comfyui_h3.h3core.checkpoint.index import TensorEntry
from comfyui_h3.h3core.errors import CheckpointError

NUM_TENSORS = 64  # of a component, evenly over its names


def same_weights(first: Mapping[str, TensorEntry], second: Mapping[str, TensorEntry]) -> bool:
    """Whether names, shapes and dtypes are equal, and so is the first row of 64 tensors.

    Weights that were trained apart differ in every tensor. Raises CheckpointError when a file cannot be read.
    """
    if first.keys() != second.keys():
        return False
    if any((entry.shape, entry.dtype) != (second[name].shape, second[name].dtype) for name, entry in first.items()):
        return False
    names = sorted(first)[:: max(1, len(first) // NUM_TENSORS)]
    if all(first[name].file.resolve() == second[name].file.resolve() for name in names):
        return True
    ours, theirs = _first_rows(first, names), _first_rows(second, names)
    return all(torch.equal(ours[name], theirs[name]) for name in names)


def _first_rows(entries: Mapping[str, TensorEntry], names: Iterable[str]) -> dict[str, Tensor]:
    names_of_file: dict[Path, list[str]] = defaultdict(list)
    for name in names:
        names_of_file[entries[name].file].append(name)
    rows = {}
    for file, wanted in names_of_file.items():
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in wanted:
                    rows[name] = tensors.get_slice(name)[:1] if entries[name].shape else tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}); download it again") from error
    return rows
