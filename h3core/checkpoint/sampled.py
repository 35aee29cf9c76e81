"""Whether two components hold the same weights, from a sample: both partitions of a release share most parts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from comfyui_h3.h3core.checkpoint.index import TensorEntry
from comfyui_h3.h3core.errors import CheckpointError


def same_weights(first: Mapping[str, TensorEntry], second: Mapping[str, TensorEntry]) -> bool:
    """Whether names, shapes and dtypes are equal, and the first, middle and last row of every tensor.

    Training moves every row of a matrix, and so does merging an adapter. Raises CheckpointError when a file cannot be
    read.
    """
    if first.keys() != second.keys():
        return False
    if any((entry.shape, entry.dtype) != (second[name].shape, second[name].dtype) for name, entry in first.items()):
        return False
    with ExitStack() as files:
        opened: dict[Path, Any] = {}
        for name, entry in first.items():
            ours, theirs = entry.file.resolve(), second[name].file.resolve()
            if ours == theirs:
                continue
            try:
                for file in (ours, theirs):
                    if file not in opened:
                        opened[file] = files.enter_context(safe_open(file, framework="pt", device="cpu"))
                if not _same_rows(opened[ours], opened[theirs], name, entry.shape):
                    return False
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{name} of {ours} or {theirs} cannot be read ({error}); download it again"
                ) from error
    return True


def _same_rows(ours: Any, theirs: Any, name: str, shape: tuple[int, ...]) -> bool:
    if not shape:
        return torch.equal(ours.get_tensor(name), theirs.get_tensor(name))
    one, other = ours.get_slice(name), theirs.get_slice(name)
    rows = {0, shape[0] // 2, shape[0] - 1} if shape[0] else set()
    return all(torch.equal(one[row : row + 1], other[row : row + 1]) for row in sorted(rows))
