"""Building a module without memory, checking it against a file's headers, and streaming the weights into it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from comfyui_h3.h3core.accel.fp8 import use_fp8_linears
from comfyui_h3.h3core.checkpoint.index import TensorEntry, some_of
from comfyui_h3.h3core.checkpoint.keymap import KeyMap
from comfyui_h3.h3core.checkpoint.read_ahead import read_ahead
from comfyui_h3.h3core.errors import CheckpointError
from comfyui_h3.h3core.models.fp8_linear import Fp8Linear
from comfyui_h3.h3core.types import Progress

M = TypeVar("M", bound=nn.Module)

Read = Callable[[Iterable[str], Mapping[str, torch.dtype]], Iterable[tuple[str, Tensor]]]
"""Names wanted, and the dtype of each -> names and tensors, in any order; a ``Reader``'s."""


def build(make: Callable[[], M], dtype: torch.dtype) -> M:
    """A module on ``meta``, its weights in ``dtype`` except those under its ``FLOAT32`` prefixes.

    With float8_e4m3fn the linears that its ``FP8`` matches are in 8 bits, and all else in bfloat16.
    """
    with torch.device("meta"):
        module = make()
    float32 = getattr(module, "FLOAT32", ())
    in_8_bits = getattr(module, "FP8", None) if dtype == torch.float8_e4m3fn else None
    dtype = torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype
    for name, tensor in module.state_dict(keep_vars=True).items():
        wanted = torch.float32 if name.startswith(float32) else dtype
        if tensor.is_floating_point() and tensor.dtype != wanted:
            _assign(module, name, torch.empty_like(tensor, dtype=wanted, device="meta"))
    if in_8_bits is not None:
        use_fp8_linears(module, in_8_bits)
    return module.eval().requires_grad_(False)


def materialize(module: M, value: Callable[[str, Tensor], Tensor]) -> M:
    """Fills a module made by ``build`` with ``value(name, tensor on meta)`` for each tensor that files hold."""
    for name, tensor in _stored(module).items():
        _assign(module, name, value(name, tensor))
    return module


def check(module: nn.Module, entries: Mapping[str, TensorEntry], source: Path, *, float16: bool = False) -> None:
    """Compares names, shapes and dtypes of a module made by ``build`` with those of the files. Reads no weights.

    Raises CheckpointError naming keys, shapes and dtypes when a tensor is missing, unknown, of another shape, or stored
    in a dtype that cannot hold it: float32 parts must be float32, and float16 fits only what says so by ``float16``.
    """
    wanted = _stored(module)
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
        halves = (torch.float16, torch.bfloat16) if float16 else (torch.bfloat16,)
        allowed = (torch.float32,) if name.startswith(float32) else (*halves, torch.float32)
        if entry.dtype not in allowed:
            raise CheckpointError(
                f"{source}: {name} is stored as {_dtype(entry.dtype)}; "
                f"this version reads {' and '.join(map(_dtype, allowed))} there"
            )


def load(module: M, entries: Mapping[str, TensorEntry], source: Path, read: Read, *, float16: bool = False) -> M:
    """Fills a module made by ``build``, tensor by tensor, and returns it where ``read`` puts them.

    At no time is more than one tensor held twice; a weight in 8 bits becomes so when it is read.
    Raises CheckpointError as ``check`` and ``read`` do.
    """
    check(module, entries, source, float16=float16)
    missing = set(entries)
    with _closing(read(entries, {name: tensor.dtype for name, tensor in _stored(module).items()})) as tensors:
        for name, tensor in tensors:
            _assign(module, name, tensor)
            missing.discard(name)
    if missing:
        raise CheckpointError(f"{source}: {some_of(sorted(missing))} was not read; run Load H3 again")
    return module


class Reader:
    """Reads tensors of one component, all at once or some at a time; ``on_load`` counts the bytes of them all.

    What ``on_load`` raises ends the load. Raises CheckpointError when a file cannot be read, or has changed.
    """

    def __init__(
        self, *, entries: Mapping[str, TensorEntry], keymap: KeyMap, device: torch.device, on_load: Progress | None
    ):
        self._entries = entries
        self._keymap = keymap
        self._device = device
        self._on_load = on_load or (lambda done, total: None)
        self._done, self._total = 0, sum(entry.num_bytes for entry in entries.values())
        self._on_load(self._done, self._total)

    def __call__(self, names: Iterable[str], dtypes: Mapping[str, torch.dtype]) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors on the device, in ``dtypes``, file by file in the order of the bytes.

        Of host memory it takes what ``read_ahead`` does, and on the CPU a tensor twice while it is converted.
        """
        tensors = [(name, self._entries[name]) for name in names]
        files = {file: index for index, file in enumerate(dict.fromkeys(entry.file for _, entry in tensors))}
        tensors.sort(key=lambda named: (files[named[1].file], named[1].offset))
        with closing(read_ahead(tensors, self._device)) as reading:
            for name, tensor in reading:
                tensor = tensor.to(dtypes[name])
                order = self._keymap.order(name)
                yield name, tensor if order is None else order(tensor).contiguous()
                self._done += self._entries[name].num_bytes
                self._on_load(self._done, self._total)


def stream(
    module: nn.Module, entries: Mapping[str, TensorEntry], source: Path, read: Read
) -> Callable[[str], AbstractContextManager[None]]:
    """For a module made by ``build`` whose parts are needed one after the other: the function ``resident``. Within
    ``resident(prefix)`` the weights under a prefix are where ``read`` puts them, and on meta again after it.

    Raises CheckpointError as ``load`` does, here or when the weights are read.
    """
    check(module, entries, source)
    empty, stored = module.state_dict(), _stored(module)

    @contextmanager
    def resident(prefix: str) -> Iterator[None]:
        names = [name for name in entries if name.startswith(prefix)]
        try:
            with _closing(read(names, {name: stored[name].dtype for name in names})) as tensors:
                for name, tensor in tensors:
                    _assign(module, name, tensor)
            yield
        finally:
            for name in names:
                _assign(module, name, empty[name])

    return resident


@contextmanager
def _closing(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Iterable[tuple[str, Tensor]]]:
    """Ends the reading with the ``with``: an error's traceback would keep it, with its threads, for longer."""
    try:
        yield tensors
    finally:
        if isinstance(tensors, Generator):
            tensors.close()


def num_bytes(module: nn.Module) -> int:
    """Bytes of a module's tensors, on meta too."""
    return sum(tensor.nbytes for tensor in module.state_dict().values())


def _stored(module: nn.Module) -> dict[str, Tensor]:
    """What files hold of a module on meta, by name, in the dtypes in which it is handed to ``_assign``."""
    tensors = module.state_dict(keep_vars=True)
    for name, child in module.named_modules():
        if isinstance(child, Fp8Linear):
            tensors[f"{name}.weight"] = tensors[f"{name}.weight"].to(torch.bfloat16)
            for derived in child.DERIVED:
                del tensors[f"{name}.{derived}"]
    return tensors


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _assign(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Puts ``tensor`` in the place of the parameter or buffer ``name``, in 8 bits where that is a weight in 8 bits."""
    owner, _, leaf = name.rpartition(".")
    parent = module.get_submodule(owner)
    if isinstance(parent, Fp8Linear) and leaf == "weight" and tensor.dtype != parent.weight.dtype:
        parent.quantize(tensor)
    elif leaf in parent._parameters:
        parent._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        parent._buffers[leaf] = tensor
