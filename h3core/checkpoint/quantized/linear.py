"""One linear whose weight a file holds as several tensors, and the checks that every kind makes of its header."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from comfyui_h3.h3core.checkpoint.index import TensorEntry
from comfyui_h3.h3core.errors import CheckpointError
from comfyui_h3.kernels.quantize_fp8 import QuantizedRows

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedLinear(ABC):
    """How the tensors of one linear become its weight.

    name: of the module. shape: (N, K) of its weight. keys: role of each tensor that is read -> its key in the file.
    """

    KIND: ClassVar[str]

    name: str
    shape: tuple[int, int]
    keys: Mapping[str, str]

    @abstractmethod
    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """By role, in the dtypes of the file -> the weight that multiplies the rows, (N, K) float32."""

    def fp8_rows(self, tensors: Mapping[str, Tensor]) -> QuantizedRows | None:
        """The weight as it is stored, where that is e4m3 with no more than one scale a row."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a file's header says of the tensors of one linear, by role."""

    name: str
    kind: str
    source: Path
    entries: Mapping[str, TensorEntry]
    keys: Mapping[str, str]

    def check_roles(self, *, needed: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
        """Raises CheckpointError where a tensor is missing, or is none of this kind's."""
        missing = [role for role in needed if role not in self.entries]
        if missing:
            raise CheckpointError(
                f"{self.source}: {self.name} is stored as {self.kind}, but has no {' and no '.join(missing)}; "
                "download the file again"
            )
        unknown = sorted(self.entries.keys() - {*needed, *optional})
        if unknown:
            raise CheckpointError(
                f"{self.source}: {self.name} has {', '.join(unknown)}, which {self.kind} does not have in this "
                "version; take a file of another kind, or one that is not quantised"
            )

    def matrix(self, role: str, dtypes: tuple[torch.dtype, ...]) -> tuple[int, int]:
        """The shape of a tensor of two axes, none of them empty."""
        entry = self.entries[role]
        if entry.dtype not in dtypes or len(entry.shape) != 2 or 0 in entry.shape:
            raise self._refusal(role, dtypes, "[N, K]")
        return entry.shape[0], entry.shape[1]

    def check(self, role: str, dtypes: tuple[torch.dtype, ...], *shapes: Shape) -> None:
        """Raises CheckpointError unless a tensor, if it is there, has one of the dtypes and one of the shapes."""
        entry = self.entries.get(role)
        if entry is not None and (entry.dtype not in dtypes or entry.shape not in shapes):
            raise self._refusal(role, dtypes, " or ".join(str(list(shape)) for shape in shapes))

    def check_blocks(self, num_inputs: int, block: int) -> None:
        """Raises CheckpointError unless a row is a whole number of blocks."""
        if num_inputs % block:
            raise CheckpointError(
                f"{self.source}: {self.name} has {num_inputs} inputs; {self.kind} holds a multiple of {block}"
            )

    def read(self, *roles: str) -> dict[str, str]:
        """Keys of the tensors that are read, of those that are there."""
        return {role: self.keys[role] for role in roles if role in self.keys}

    def _refusal(self, role: str, dtypes: tuple[torch.dtype, ...], shapes: str) -> CheckpointError:
        entry = self.entries[role]
        return CheckpointError(
            f"{self.source}: {self.keys[role]} is {_name(entry.dtype)} {list(entry.shape)}; "
            f"{self.kind} has {' or '.join(map(_name, dtypes))} {shapes} there"
        )


def scalar_or_rows(num_rows: int) -> tuple[Shape, ...]:
    """Shapes of one scale for a weight, and of one for each of its rows."""
    return ((), (1,), (1, 1), (num_rows,), (num_rows, 1))


def column(scale: Tensor) -> Tensor:
    """A scale of one of these shapes -> (1, 1) or (N, 1) float32."""
    return scale.float().reshape(-1, 1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
