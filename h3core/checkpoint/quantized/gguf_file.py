"""GGUF files, through llama.cpp's ``gguf`` package, an optional extra: which tensors they hold, and their values.

Axes are stored in reverse. ComfyUI-GGUF's converter folds tensors whose rows do not fill blocks to rows of 256, and
keeps their shape under ``comfy.gguf.orig_shape.<name>`` (its ``tools/convert.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from comfyui_h3.h3core.checkpoint.index import TensorEntry, file_stamp
from comfyui_h3.h3core.errors import CheckpointError
from comfyui_h3.h3core.types import Progress

K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
READ = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *K_QUANTS)
MAGIC = b"GGUF"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GgufTensor:
    """One tensor: its shape, the name of its type in ggml, and its blocks, mapped from the file."""

    shape: tuple[int, ...]
    kind: str
    blocks: Any  # numpy array
    _package: ModuleType

    def dequantize(self) -> Tensor:
        """The values that its blocks stand for, float32 on the CPU."""
        quants, types = self._package.quants, self._package.GGMLQuantizationType
        values = quants.dequantize(self.blocks, types[self.kind])
        # Floats come as a view of the mapped file, which may be replaced on disk.
        return torch.from_numpy(values if values.flags.writeable else values.copy()).reshape(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GgufFile:
    """What a GGUF file says of itself. ``architecture``: as its writer named it; the keys say what it is."""

    path: Path
    architecture: str
    tensors: Mapping[str, GgufTensor]
    stamp: tuple[int, int]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Reads the header, no weights. Raises CheckpointError without the ``gguf`` package, for a file that is none or
        is cut short, and for types that this version does not read."""
        gguf = _package(path)
        try:
            stamp = file_stamp(path)
            with path.open("rb") as file:
                if file.read(len(MAGIC)) != MAGIC:
                    raise CheckpointError(f"{path} is not a GGUF file; download it again")
            reader = gguf.GGUFReader(path)
            _check_data(path, reader)
            field = reader.get_field("general.architecture")
            architecture = "" if field is None else str(field.contents())
            tensors = {tensor.name: _tensor(path, reader, tensor, gguf) for tensor in reader.tensors}
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror or error}); download it again") from error
        except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
            raise CheckpointError(f"{path} is cut short, or no GGUF file ({error!r}); download it again") from error
        return cls(path=path, architecture=architecture, tensors=tensors, stamp=stamp)

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """As ``loader.check`` compares it: the shapes of the values, which are float32."""
        return {
            name: TensorEntry(file=self.path, shape=tensor.shape, dtype=torch.float32, stamp=self.stamp)
            for name, tensor in self.tensors.items()
        }


class GgufReader:
    """A ``loader.Read`` of a GGUF file, in the rows' order of the file; ``on_load`` counts the bytes of ``names``."""

    def __init__(self, *, file: GgufFile, names: Iterable[str], device: torch.device, on_load: Progress | None):
        self._file = file
        self._device = device
        self._on_load = on_load or (lambda done, total: None)
        self._done, self._total = 0, sum(file.tensors[name].blocks.nbytes for name in names)
        self._on_load(self._done, self._total)

    def __call__(self, names: Iterable[str], dtypes: Mapping[str, torch.dtype]) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors on the device, in ``dtypes``. Raises CheckpointError when the file has changed."""
        if file_stamp(self._file.path) != self._file.stamp:
            raise CheckpointError(f"{self._file.path} was changed after it was opened; run Load H3 again")
        for name in names:
            tensor = self._file.tensors[name]
            yield name, tensor.dequantize().to(device=self._device, dtype=dtypes[name])
            self._done += tensor.blocks.nbytes
            self._on_load(self._done, self._total)


def _check_data(path: Path, reader: Any) -> None:
    """What the package leaves unchecked."""
    if reader.endianess.name != "LITTLE":
        raise CheckpointError(f"{path} was written for big-endian machines; convert it on one of these")
    end, before = 0, ""
    for tensor in sorted(reader.tensors, key=lambda tensor: tensor.data_offset):
        if tensor.data_offset < end:
            raise CheckpointError(f"{path}: {tensor.name} and {before} share their bytes; download the file again")
        end, before = tensor.data_offset + tensor.data.nbytes, tensor.name


def _tensor(path: Path, reader: Any, tensor: Any, gguf: ModuleType) -> GgufTensor:
    kind = tensor.tensor_type.name
    if kind not in READ:
        raise CheckpointError(f"{path}: {tensor.name} is stored as {kind}; this version reads {', '.join(READ)}")
    shape = tuple(int(size) for size in reversed(tensor.shape))
    field = reader.get_field(f"comfy.gguf.orig_shape.{tensor.name}")
    if field is not None:
        folded, shape = shape, tuple(int(size) for size in field.contents())
        if math.prod(shape) != math.prod(folded):
            raise CheckpointError(
                f"{path}: {tensor.name} has the shape {list(folded)}, which is not its orig_shape {list(shape)} "
                "folded; download the file again"
            )
    return GgufTensor(shape=shape, kind=kind, blocks=tensor.data, _package=gguf)


def _package(path: Path) -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(
            f"{path} is a GGUF file, which takes the gguf package to read: run `pip install gguf` with ComfyUI's "
            "Python, or take a .safetensors file"
        ) from error
    return gguf
