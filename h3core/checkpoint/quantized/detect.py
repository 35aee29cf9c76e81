"""What of a component is stored quantised, told from keys, dtypes and markers; nothing is guessed.

Markers of ComfyUI (``comfy/utils.py``, ``convert_old_quants``): a uint8 tensor ``<linear>.comfy_quant`` that holds
JSON, or the same objects in the file's metadata under ``_quantization_metadata``; before them a tensor ``scaled_fp8``
for the whole file, whose two elements, instead of none, ask for products that are not in FP8. SVDQuant is marked in the
component's config.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comfyui_h3.h3core.checkpoint.index import TensorEntry, some_of
from comfyui_h3.h3core.checkpoint.quantized.fp8_scaled import FLOAT8, Fp8Scaled
from comfyui_h3.h3core.checkpoint.quantized.int8 import Int8
from comfyui_h3.h3core.checkpoint.quantized.linear import FLOATS, Parts, QuantizedLinear
from comfyui_h3.h3core.checkpoint.quantized.mxfp8 import Mxfp8
from comfyui_h3.h3core.checkpoint.quantized.nvfp4 import Nvfp4
from comfyui_h3.h3core.checkpoint.quantized.svdquant import SvdQuant
from comfyui_h3.h3core.errors import CheckpointError

METADATA = "_quantization_metadata"
MARKER, OLD_MARKER = "comfy_quant", "scaled_fp8"
PREFIXES = ("", "model.diffusion_model.")
MAX_MARKER_BYTES = 65_536

OLD_ROLES = {"scale_weight": "weight_scale", "scale_input": "input_scale"}

# Formats of comfy_quant; those of ComfyUI that are not here: convrot_w4a4 and asym_w4a8_int8.
COMFY: dict[str, Callable[[Parts, Mapping[str, Any]], QuantizedLinear]] = {
    "float8_e4m3fn": lambda parts, options: _fp8(parts, options, torch.float8_e4m3fn),
    "float8_e5m2": lambda parts, options: _fp8(parts, options, torch.float8_e5m2),
    "int8_tensorwise": Int8.of,
    "nvfp4": lambda parts, options: Nvfp4.of(parts),
    "mxfp8": lambda parts, options: Mxfp8.of(parts),
}
READ = (*COMFY, "fp8_scaled", "svdquant with precision nvfp4")

# Last parts of keys of kinds that are not read, for the name in the message.
UNREAD = {
    "weight_scale_inv": "FP8 in blocks of 128 x 128",
    "weight_packed": "compressed-tensors",
    "qzeros": "GPTQ or AWQ",
    "absmax": "bitsandbytes",
    "bitsandbytes__nf4": "bitsandbytes",
    "bitsandbytes__fp4": "bitsandbytes",
    "SCB": "bitsandbytes int8",
}

PACKED = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)  # no weight of H3 is itself one of these


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """A component's tensors, told apart. linears: how each quantised weight is stored, by the name of the weight.
    plain: all that are parameters as they are, by name."""

    linears: Mapping[str, QuantizedLinear]
    plain: Mapping[str, TensorEntry]
    stored: Mapping[str, TensorEntry]

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """What the component gives, as ``loader.check`` compares it: of a quantised linear, its weight."""
        weights = {}
        for name, linear in self.linears.items():
            first = self.stored[next(iter(linear.keys.values()))]
            weights[name] = TensorEntry(file=first.file, shape=linear.shape, dtype=torch.float32, stamp=first.stamp)
        return {**self.plain, **weights}

    def read_entries(self) -> dict[str, TensorEntry]:
        """What is read of the files, by key: without markers, and without scales of rows."""
        keys = [key for linear in self.linears.values() for key in linear.keys.values()]
        return {**self.plain, **{key: self.stored[key] for key in keys}}

    def summary(self) -> str:
        """For a log line and for the node: "200 x fp8_scaled, 4 x nvfp4", or "not quantised"."""
        counts = Counter(linear.KIND for linear in self.linears.values())
        return ", ".join(f"{count} x {kind}" for kind, count in sorted(counts.items())) or "not quantised"


def find_quantized(
    entries: Mapping[str, TensorEntry],
    source: Path,
    read: Callable[[str], Tensor],
    *,
    metadata: Iterable[Mapping[str, str]] = (),
    config: Mapping[str, Any] | None = None,
) -> Quantization:
    """Tells a component's tensors apart by its headers; ``read`` is asked for markers only, some bytes each.

    entries: every tensor of the component by key. metadata: the safetensors ``__metadata__`` of each file. config: the
    component's ``quantization_config``. Raises CheckpointError naming the linear and what is wrong with it: a kind that
    this version does not read, markers that contradict each other, packed tensors that no marker explains.
    """
    leaves: dict[str, dict[str, str]] = {}  # linear -> last part -> key
    for key in entries:
        owner, _, leaf = key.rpartition(".")
        leaves.setdefault(owner, {})[leaf] = key
    formats = _comfy_formats(entries, source, read, metadata)
    found = _from_comfy(formats, leaves, entries, source)
    found += _from_old(formats, leaves, entries, source)
    found += _from_fp8({linear.name for linear in found}, leaves, entries, source)
    found += _from_svdquant(config or {}, leaves, entries, source)
    used = {prefix + OLD_MARKER for prefix in PREFIXES}
    used |= {key for linear in found for leaf, key in leaves[linear.name].items() if leaf != "bias"}
    plain = {key: entry for key, entry in entries.items() if key not in used}
    _refuse_unexplained(plain, source)
    return Quantization(linears={f"{linear.name}.weight": linear for linear in found}, plain=plain, stored=entries)


def _comfy_formats(
    entries: Mapping[str, TensorEntry],
    source: Path,
    read: Callable[[str], Tensor],
    metadata: Iterable[Mapping[str, str]],
) -> dict[str, dict[str, Any]]:
    """Linear -> its object, from the tensors and from the metadata."""
    formats: dict[str, dict[str, Any]] = {}
    for key, entry in entries.items():
        owner, _, leaf = key.rpartition(".")
        if leaf != MARKER:
            continue
        if entry.dtype != torch.uint8 or len(entry.shape) != 1 or entry.num_bytes > MAX_MARKER_BYTES:
            raise CheckpointError(f"{source}: {key} is not JSON in bytes; download the file again")
        formats[owner] = _object(bytes(read(key).tolist()), f"{source}: {key}")
    for text in (values[METADATA] for values in metadata if METADATA in values):
        where = f"{source}: {METADATA}"
        layers = _object(text, where).get("layers")
        if not isinstance(layers, dict):
            raise CheckpointError(f"{where} has no layers; download the file again")
        for layer, options in layers.items():
            name = _name(layer, entries)
            if name is None:
                raise CheckpointError(f"{where} names {layer}, of which the file has no weight; download it again")
            if not isinstance(options, dict):
                raise CheckpointError(f"{where} names {layer}, and says {options!r}, not an object; download it again")
            if formats.setdefault(name, options) != options:
                raise CheckpointError(
                    f"{where} says {options} of {layer}, its {MARKER} says {formats[name]}; download the file again"
                )
    return formats


def _name(layer: str, entries: Mapping[str, TensorEntry]) -> str | None:
    """The name under which a layer's weight is here: metadata and keys may differ in their prefix."""
    bare = next((layer.removeprefix(prefix) for prefix in PREFIXES if prefix and layer.startswith(prefix)), layer)
    return next((prefix + bare for prefix in PREFIXES if f"{prefix}{bare}.weight" in entries), None)


def _from_comfy(
    formats: Mapping[str, dict[str, Any]],
    leaves: Mapping[str, Mapping[str, str]],
    entries: Mapping[str, TensorEntry],
    source: Path,
) -> list[QuantizedLinear]:
    linears: list[QuantizedLinear] = []
    for name, options in formats.items():
        kind = options.get("format")
        if not isinstance(kind, str) or kind not in COMFY:
            raise _unread(source, name, f"as {kind!r}")
        nested = options.get("params")
        # ComfyUI reads an option beside the format, or else under "params".
        flat = {**(nested if isinstance(nested, dict) else {}), **options}
        if flat.get("convrot", False) and kind != Int8.KIND:
            raise _unread(source, name, f"as {kind!r} with convrot")
        linears.append(COMFY[kind](_parts(name, kind, leaves[name], entries, source), flat))
    return linears


def _from_old(
    formats: Mapping[str, Any],
    leaves: Mapping[str, Mapping[str, str]],
    entries: Mapping[str, TensorEntry],
    source: Path,
) -> list[QuantizedLinear]:
    """The linears that have a scale_weight, which a ``scaled_fp8`` of their prefix must explain.

    Converters give one to layers that they leave in float, too: it scales those in the same way.
    """
    linears: list[QuantizedLinear] = []
    markers = {prefix: entries[prefix + OLD_MARKER] for prefix in PREFIXES if prefix + OLD_MARKER in entries}
    for name in (name for name, keys in leaves.items() if "scale_weight" in keys):
        marker = next((marker for prefix, marker in markers.items() if name.startswith(prefix)), None)
        if marker is None:
            raise CheckpointError(
                f"{source}: {name} has a scale_weight, but no {OLD_MARKER} says what it scales; download the file again"
            )
        if name in formats:
            raise CheckpointError(f"{source}: {name} is marked by {MARKER} and {OLD_MARKER}; download the file again")
        parts = _parts(name, "fp8_scaled", leaves[name], entries, source)
        linears.append(Fp8Scaled.of(parts, dtypes=(*FLOAT8, *FLOATS), full_precision=marker.num_elements == 2))
    return linears


def _from_fp8(
    named: Set[str], leaves: Mapping[str, Mapping[str, str]], entries: Mapping[str, TensorEntry], source: Path
) -> list[QuantizedLinear]:
    """A float8 weight beside its weight_scale, without a marker: there is one way to read it."""
    return [
        Fp8Scaled.of(_parts(name, "fp8_scaled", keys, entries, source), dtypes=FLOAT8, full_precision=False)
        for name, keys in leaves.items()
        if name not in named and {"weight", "weight_scale"} <= keys.keys() and entries[keys["weight"]].dtype in FLOAT8
    ]


def _from_svdquant(
    config: Mapping[str, Any],
    leaves: Mapping[str, Mapping[str, str]],
    entries: Mapping[str, TensorEntry],
    source: Path,
) -> list[QuantizedLinear]:
    names = [name for name, keys in leaves.items() if {"qweight", "wscales"} <= keys.keys()]
    if not names:
        return []
    if config.get("quant_method") != "svdquant":
        raise CheckpointError(
            f"{source}: {names[0]} is stored as SVDQuant, but no config says quant_method=svdquant: the order of its "
            "bytes is unknown. Files of Nunchaku are not read; take one for vLLM-Omni, with its config.json"
        )
    precision, unsigned = config.get("precision", "nvfp4"), config.get("act_unsigned", False)
    if precision != "nvfp4" or unsigned:
        raise _unread(source, names[0], f"as svdquant with precision={precision!r} and act_unsigned={unsigned!r}")
    return [SvdQuant.of(_parts(name, SvdQuant.KIND, leaves[name], entries, source)) for name in names]


def _refuse_unexplained(plain: Mapping[str, TensorEntry], source: Path) -> None:
    for key in plain:
        owner, _, leaf = key.rpartition(".")
        if leaf in UNREAD:
            raise _unread(source, owner, f"as {UNREAD[leaf]} ({leaf})")
    unexplained = sorted(key for key, entry in plain.items() if entry.dtype in PACKED)
    if unexplained:
        dtype = str(plain[unexplained[0]].dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{source}: {some_of(unexplained)} of {dtype}, and nothing in the file says how to read it; "
            f"this version reads {', '.join(READ)}"
        )


def _parts(name: str, kind: str, leaves: Mapping[str, str], entries: Mapping[str, TensorEntry], source: Path) -> Parts:
    keys = {OLD_ROLES.get(leaf, leaf): key for leaf, key in leaves.items()}
    return Parts(
        name=name, kind=kind, source=source, keys=keys, entries={role: entries[key] for role, key in keys.items()}
    )


def _fp8(parts: Parts, options: Mapping[str, Any], dtype: torch.dtype) -> Fp8Scaled:
    full_precision = options.get("full_precision_matrix_mult", False) is True
    return Fp8Scaled.of(parts, dtypes=(dtype,), full_precision=full_precision)


def _object(text: bytes | str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON ({error}); download the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} holds {type(value).__name__}, not a JSON object; download the file again")
    return value


def _unread(source: Path, name: str, how: str) -> CheckpointError:
    return CheckpointError(
        f"{source}: {name} is stored {how}, which this version does not read; it reads {', '.join(READ)}"
    )
