"""Building a module without memory, checking it against a file's headers, and streaming the weights into it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from comfyui_h3.h3core.checkpoint.index import TensorEntry
from comfyui_h3.h3core.checkpoint.keymap import KeyMap
from comfyui_h3.h3core.errors import CheckpointError
from comfyui_h3.h3core.types import Progress

M = TypeVar("M", bound=nn.Module)


def build(make: Callable[[], M], dtype: torch.dtype) -> M:
    """A module on ``meta``, its weights in ``dtype`` except those under its ``FLOAT32`` prefixes."""
    with torch.device("meta"):
        module = make()
    float32 = getattr(module, "FLOAT32", ())
    for name, tensor in module.state_dict(keep_vars=True).items():
        wanted = torch.float32 if name.startswith(float32) else dtype
        if tensor.is_floating_point() and tensor.dtype != wanted:
            _assign(module, name, torch.empty_like(tensor, dtype=wanted, device="meta"))
    return module.eval().requires_grad_(False)


def materialize(module: M, value: Callable[[str, Tensor], Tensor]) -> M:
    """Fills a module made by ``build`` with ``value(name, tensor on meta)`` for each of its tensors."""
    for name, tensor in module.state_dict(keep_vars=True).items():
        _assign(module, name, value(name, tensor))
    return module


def check(module: nn.Module, entries: Mapping[str, TensorEntry], keymap: KeyMap, source: Path) -> dict[str, str]:
    """File key of every parameter of ``module``, in the order of the file.

    Raises CheckpointError naming keys and shapes when one is missing, unknown, or of another shape. Reads no weights.
    """
    wanted = {name: tensor.shape for name, tensor in module.state_dict().items()}
    found = {name: key for key in entries if (name := keymap.parameter(key)) is not None}
    for problem, names in (("lacks", wanted.keys() - found.keys()), ("has unknown", found.keys() - wanted.keys())):
        if names:
            some = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise CheckpointError(f"{source} {problem} {some}; its weights and its config are not of one checkpoint")
    for name, key in found.items():
        if tuple(wanted[name]) != entries[key].shape:
            raise CheckpointError(
                f"{source}: {key} has the shape {list(entries[key].shape)}, the config wants {list(wanted[name])}"
            )
        if not entries[key].dtype.is_floating_point or entries[key].dtype.itemsize < 2:
            raise CheckpointError(
                f"{source}: {key} is stored as {entries[key].dtype}; this version reads bfloat16, float16 and float32"
            )
    return found


def load(
    module: M,
    entries: Mapping[str, TensorEntry],
    keymap: KeyMap,
    source: Path,
    device: torch.device,
    on_load: Progress | None = None,
) -> M:
    """Fills a module made by ``build``, file by file, and returns it on ``device``.

    At no time is more than one tensor held twice. ``on_load`` counts bytes of the files; what it raises ends the load.
    Raises CheckpointError as ``check`` does, or when a file changes.
    """
    keys_of_file: dict[Path, list[tuple[str, str]]] = defaultdict(list)
    for name, key in check(module, entries, keymap, source).items():
        keys_of_file[entries[key].file].append((name, key))
    dtypes = {name: tensor.dtype for name, tensor in module.state_dict().items()}
    done, total = 0, sum(entries[key].num_bytes for names in keys_of_file.values() for _, key in names)
    if on_load is not None:
        on_load(done, total)
    for file, names in keys_of_file.items():
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name, key in names:
                    # A copy always: safetensors hands out views of the mapped file, which may be replaced on disk.
                    tensor = tensors.get_tensor(key).to(device=device, dtype=dtypes[name], copy=True)
                    order = keymap.order(name)
                    _assign(module, name, tensor if order is None else order(tensor).contiguous())
                    done += entries[key].num_bytes
                    if on_load is not None:
                        on_load(done, total)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}); download it again") from error
    return module


def _assign(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Puts ``tensor`` in the place of the parameter or buffer ``name``."""
    owner, _, leaf = name.rpartition(".")
    parent = module.get_submodule(owner)
    if leaf in parent._parameters:
        parent._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        parent._buffers[leaf] = tensor
