"""Building a module without memory, checking it against a file's headers, and streaming the weights into it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from comfyui_h3.h3core.checkpoint.index import TensorEntry, file_stamp, some_of
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


def check(module: nn.Module, entries: Mapping[str, TensorEntry], source: Path) -> None:
    """Compares names, shapes and dtypes of a module made by ``build`` with those of the files. Reads no weights.

    Raises CheckpointError naming keys, shapes and dtypes when a tensor is missing, unknown, of another shape, or stored
    in a dtype that cannot hold it: float32 parts must be float32, and nothing of H3 fits float16.
    """
    wanted = module.state_dict()
    for problem, names in (("lacks", wanted.keys() - entries.keys()), ("has unknown", entries.keys() - wanted.keys())):
        if names:
            raise CheckpointError(
                f"{source} {problem} {some_of(sorted(names))}; its weights and its config are not of one checkpoint"
            )
    float32 = getattr(module, "FLOAT32", ())
    for name, entry in entries.items():
        if tuple(wanted[name].shape) != entry.shape:
            raise CheckpointError(
                f"{source}: {name} has the shape {list(entry.shape)}, the config wants {list(wanted[name].shape)}"
            )
        allowed = (torch.float32,) if name.startswith(float32) else (torch.bfloat16, torch.float32)
        if entry.dtype not in allowed:
            raise CheckpointError(
                f"{source}: {name} is stored as {_dtype(entry.dtype)}; "
                f"this version reads {' and '.join(map(_dtype, allowed))} there"
            )


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
    check(module, entries, source)
    names_of_file: dict[Path, list[str]] = defaultdict(list)
    for name, entry in entries.items():
        names_of_file[entry.file].append(name)
    dtypes = {name: tensor.dtype for name, tensor in module.state_dict().items()}
    done, total = 0, sum(entry.num_bytes for entry in entries.values())
    if on_load is not None:
        on_load(done, total)
    for file, names in names_of_file.items():
        try:
            if file_stamp(file) != entries[names[0]].stamp:
                raise CheckpointError(f"{file} was changed after it was opened; run Load H3 again")
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in names:
                    # A copy always: safetensors hands out views of the mapped file, which may be replaced on disk.
                    tensor = tensors.get_tensor(name).to(device=device, dtype=dtypes[name], copy=True)
                    order = keymap.order(name)
                    _assign(module, name, tensor if order is None else order(tensor).contiguous())
                    done += entries[name].num_bytes
                    if on_load is not None:
                        on_load(done, total)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}); download it again") from error
    return module


def num_bytes(module: nn.Module) -> int:
    """Bytes of a module's tensors, on meta too."""
    return sum(tensor.nbytes for tensor in module.state_dict().values())


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _assign(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Puts ``tensor`` in the place of the parameter or buffer ``name``."""
    owner, _, leaf = name.rpartition(".")
    parent = module.get_submodule(owner)
    if leaf in parent._parameters:
        parent._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        parent._buffers[leaf] = tensor
