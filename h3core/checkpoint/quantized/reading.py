"""Reading quantised weights as if they were plain: for ``loader.load`` and ``loader.stream``.

A ``loader.Read`` over another: several tensors of the file become one parameter, or stay in 8 bits where the module
has an FP8 linear and the file an e4m3 weight with no more than one scale a row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from comfyui_h3.h3core.checkpoint import loader
from comfyui_h3.h3core.checkpoint.index import TensorEntry
from comfyui_h3.h3core.checkpoint.keymap import RowOrder
from comfyui_h3.h3core.checkpoint.quantized.detect import Quantization, find_quantized
from comfyui_h3.h3core.checkpoint.quantized.fp8_scaled import Fp8Scaled
from comfyui_h3.h3core.errors import CheckpointError
from comfyui_h3.h3core.models.fp8_linear import Fp8Linear

M = TypeVar("M", bound=nn.Module)


def open_quantized(
    entries: Mapping[str, TensorEntry], source: Path, config: Mapping[str, Any] | None = None
) -> Quantization:
    """What of the tensors of a component's safetensors files is quantised, by their headers, metadata and markers.

    Raises CheckpointError as ``find_quantized`` does, and when a file cannot be read.
    """
    files = sorted({entry.file for entry in entries.values()})
    try:
        with ExitStack() as stack:
            opened = {file: stack.enter_context(safe_open(file, framework="pt", device="cpu")) for file in files}
            metadata = [tensors.metadata() or {} for tensors in opened.values()]
            return find_quantized(
                entries,
                source,
                lambda key: opened[entries[key].file].get_tensor(key),
                metadata=metadata,
                config=config,
            )
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{source} cannot be read ({error}); download it again") from error


class QuantizedReader:
    """``read``, with quantised weights made plain. Beside the tensors of one linear it holds one weight.

    read: gives tensors by their keys in the file, in the dtypes asked for, and in the rows' order of the file; a
    ``loader.Reader`` over ``Quantization.read_entries`` and an empty ``KeyMap``. order: of a parameter's rows, as
    ``KeyMap.order``. fp8: names of the FP8 linears of the module, whose e4m3 weights are given as they are, each with
    its scales under ``weight_scale``.
    """

    def __init__(
        self,
        *,
        quantization: Quantization,
        read: loader.Read,
        order: Callable[[str], RowOrder | None],
        fp8: Collection[str] = (),
    ):
        self._quantization = quantization
        self._read = read
        self._order = order
        self._fp8 = frozenset(fp8)

    def __call__(self, names: Iterable[str], dtypes: Mapping[str, torch.dtype]) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors, as ``read`` gives them, and quantised weights as soon as all of their tensors are read."""
        linears, stored = self._quantization.linears, self._quantization.stored
        wanted: dict[str, torch.dtype] = {}
        weight_of: dict[str, tuple[str, str]] = {}  # key -> weight, role
        for name in names:
            if name not in linears:
                wanted[name] = dtypes[name]
                continue
            for role, key in linears[name].keys.items():
                wanted[key] = stored[key].dtype
                weight_of[key] = name, role
        parts: dict[str, dict[str, Tensor]] = {}
        for key, tensor in self._read(wanted, wanted):
            if key not in weight_of:
                yield key, self._ordered(key, tensor)
                continue
            name, role = weight_of[key]
            parts.setdefault(name, {})[role] = tensor
            if parts[name].keys() == linears[name].keys.keys():
                yield from self._weight(name, parts.pop(name), dtypes[name])

    def _weight(self, name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        linear = self._quantization.linears[name]
        rows = linear.fp8_rows(tensors) if linear.name in self._fp8 else None
        if rows is None:
            yield name, self._ordered(name, linear.dequantize(tensors).to(dtype))
        else:
            values = self._ordered(name, rows.values.view(torch.uint8)).view(rows.values.dtype)
            yield name, values
            yield f"{linear.name}.weight_scale", self._ordered(name, rows.scales[:, None]).flatten()

    def _ordered(self, name: str, tensor: Tensor) -> Tensor:
        order = self._order(name)
        return tensor if order is None else order(tensor).contiguous()


def load_quantized(
    module: M,
    quantization: Quantization,
    source: Path,
    read: loader.Read,
    order: Callable[[str], RowOrder | None] = lambda name: None,
) -> M:
    """Fills a module made by ``loader.build``, as ``loader.load`` does, from a component with quantised linears.

    e4m3 weights stay as they are in the FP8 linears of the module, those that the file wants in full precision with
    rows in bfloat16; in all others, and wherever the module's linear is plain, the weight is dequantised.
    """
    fp8 = {name: linear for name, linear in module.named_modules() if isinstance(linear, Fp8Linear)}
    for stored in quantization.linears.values():
        if stored.name in fp8:
            fp8[stored.name].weight_only = isinstance(stored, Fp8Scaled) and stored.full_precision
    reader = QuantizedReader(quantization=quantization, read=read, order=order, fp8=fp8)
    return loader.load(module, quantization.entries, source, reader)
