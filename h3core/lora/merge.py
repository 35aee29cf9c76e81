"""Merging: W + strength * alpha / rank * B A for every file of a stack, in float32, while W is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from comfyui_h3.h3core.checkpoint.keymap import stack_qkv
from comfyui_h3.h3core.checkpoint.loader import Read
from comfyui_h3.h3core.lora.file import LoraReader
from comfyui_h3.h3core.lora.names import Order
from comfyui_h3.h3core.lora.patches import Base, Patch, Planned
from comfyui_h3.h3core.models.precision import exact_fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """Merges patches, by parameter, into what a ``Read`` gives. num_heads, head_dim: of rows interleaved per head."""

    patches: Mapping[str, tuple[Patch, ...]]
    num_heads: int
    head_dim: int

    @classmethod
    def of(cls, planned: Sequence[Planned], base: Base) -> Merge:
        """Files one after the other. Those of strength 0 leave every bit as it is."""
        patches: dict[str, tuple[Patch, ...]] = {}
        for file in planned:
            for name, changes in file.patches.items():
                changes = tuple(patch for patch in changes if patch.scale)
                if changes:
                    patches[name] = patches.get(name, ()) + changes
        return cls(patches=patches, num_heads=base.num_heads, head_dim=base.head_dim)

    def __call__(self, read: Read) -> Read:
        """The same reading with every weight merged: in float32 where it is, then rounded to its dtype once.

        A weight at hand is held in float32, on the CPU twice. Raises CheckpointError when a LoRA file cannot be read.
        """

        def merged(names: Iterable[str], dtypes: Mapping[str, torch.dtype]) -> Iterator[tuple[str, Tensor]]:
            in_float32 = {name: torch.float32 for name in dtypes if name in self.patches}
            with LoraReader() as files:
                for name, tensor in read(names, {**dtypes, **in_float32}):
                    if name in self.patches:
                        tensor = self._merge(tensor, self.patches[name], files).to(dtypes[name])
                    yield name, tensor

        return merged

    def _merge(self, tensor: Tensor, patches: tuple[Patch, ...], files: LoraReader) -> Tensor:
        # In host memory what is read may be a view of a file, which nothing may write into.
        weight = tensor.to(torch.float32, copy=tensor.device.type == "cpu")
        for patch in patches:
            first, *others = (files.read(stored.key, stored.entry).to(weight.device) for stored in patch.tensors)
            change = self._ordered(first, patch.order)
            rows = weight[patch.first_row : patch.first_row + len(change)]
            if patch.kind == "product":
                with exact_fp32():
                    rows.addmm_(change, others[0], alpha=patch.scale)
            elif patch.kind == "sum":
                rows.add_(change, alpha=patch.scale)
            elif patch.scale == 1:
                rows.copy_(change)
            else:
                rows.lerp_(change, patch.scale)
        return weight

    def _ordered(self, tensor: Tensor, order: Order) -> Tensor:
        """Rows of a file as the engine has them."""
        if order == "halves swapped":
            return torch.cat(tensor.chunk(2)[::-1])
        if order == "interleaved per head":
            return stack_qkv(self.num_heads, self.head_dim)(tensor)
        return tensor
