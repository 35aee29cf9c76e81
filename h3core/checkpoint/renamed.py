"""Parameters of files that name them otherwise, store them in parts, or leave some out."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from comfyui_h3.h3core.checkpoint.index import TensorEntry, some_of
from comfyui_h3.h3core.checkpoint.keymap import KeyMap
from comfyui_h3.h3core.checkpoint.loader import Read
from comfyui_h3.h3core.errors import CheckpointError


def parameters(stored: Mapping[str, TensorEntry], keys: KeyMap, source: Path) -> dict[str, TensorEntry]:
    """Entries by parameter, from entries by key: parts of one are added up, and what files leave out is there.

    Raises CheckpointError when a part is missing, or two keys are the same parameter.
    """
    out = {
        name: TensorEntry(file=source, shape=tuple(value.shape), dtype=value.dtype, stamp=(0, 0))
        for name, value in keys.derived.items()
    }
    for name, names in _keys_by_name(stored, keys).items():
        first, part = stored[names[0]], keys.part(names[0])
        wanted = 1 if part is None else len(part[0].parts)
        if len(names) != wanted:
            raise CheckpointError(
                f"{source} has {some_of(names)} for {name}, which this layout stores in {wanted} "
                f"{'tensor' if wanted == 1 else 'tensors'}; download it again"
            )
        if part is None:
            out[name] = first
            continue
        if len({(stored[key].shape[1:], stored[key].dtype) for key in names}) != 1 or not first.shape:
            raise CheckpointError(f"{source}: {some_of(names)} do not fit each other; download it again")
        rows = sum(stored[key].shape[0] for key in names)
        out[name] = dataclasses.replace(first, shape=(rows, *first.shape[1:]))
    return out


def renaming(read: Read, stored: Mapping[str, TensorEntry], keys: KeyMap, device: torch.device) -> Read:
    """A reader of parameters over ``read``, a reader of keys; parts wait for each other on the device."""
    keys_by_name = _keys_by_name(stored, keys)

    def read_parameters(names: Iterable[str], dtypes: Mapping[str, torch.dtype]) -> Iterator[tuple[str, Tensor]]:
        stored_keys = []
        for name in names:
            if name in keys.derived:
                yield name, keys.derived[name].to(device=device, dtype=dtypes[name], copy=True)
            else:
                stored_keys += keys_by_name[name]
        waiting: dict[str, dict[int, Tensor]] = defaultdict(dict)
        for key, tensor in read(stored_keys, {key: dtypes[keys.name(key)] for key in stored_keys}):
            name, part = keys.name(key), keys.part(key)
            if part is None:
                yield name, tensor
                continue
            join, position = part
            waiting[name][position] = tensor
            if len(waiting[name]) == len(join.parts):
                parts = waiting.pop(name)
                yield name, join.join([parts[i] for i in range(len(parts))])

    return read_parameters


def _keys_by_name(stored: Mapping[str, TensorEntry], keys: KeyMap) -> dict[str, list[str]]:
    out: dict[str, list[str]] = defaultdict(list)
    for key in stored:
        out[keys.name(key)].append(key)
    return dict(out)
