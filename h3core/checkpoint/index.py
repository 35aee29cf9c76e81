"""Safetensors on disk: which file holds which tensor, checked from the headers before any weight is read."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from comfyui_h3.h3core.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format itself
MAX_JSON_BYTES = 64_000_000

SUFFIXES = (".json", ".safetensors", ".txt")  # files that change what a checkpoint does

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where one tensor is, and what its file says of it."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    stamp: tuple[int, int]  # modification time and size of the file when its header was read

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a checkpoint. Raises CheckpointError when it is absent, huge, or not one."""
    try:
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path} is not a file; download it again")
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is larger than {MAX_JSON_BYTES} bytes: not a config file of a checkpoint")
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); is the checkpoint complete?") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds {type(values).__name__}, not a JSON object; download it again")
    return values


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Tensors of one ``.safetensors`` file. Raises CheckpointError for one that is absent, cut short or malformed."""
    try:
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path} is not a file; download it again")
        stamp = file_stamp(path)
        file_size = stamp[1]
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(f"{path} is not a safetensors file (no header); download it again")
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); is the checkpoint complete?") from error
    if len(raw) < length:
        raise CheckpointError(f"{path} is cut short inside its header ({file_size} bytes); download it again")
    entries = {}
    end = 0
    try:
        header = json.loads(raw)
        for name, value in header.items():
            if name == "__metadata__":
                continue
            if value["dtype"] not in DTYPES:
                raise CheckpointError(f"{path}: {name} has the dtype {value['dtype']}, which is not supported")
            entry = TensorEntry(file=path, shape=tuple(value["shape"]), dtype=DTYPES[value["dtype"]], stamp=stamp)
            begin, stop = value["data_offsets"]
            if begin < 0 or stop - begin != entry.num_bytes:
                raise CheckpointError(f"{path}: {name} does not fill its own range of the file; download it again")
            entries[name] = entry
            end = max(end, stop)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} has a malformed header ({error!r}); download it again") from error
    if file_size < 8 + length + end:
        raise CheckpointError(
            f"{path} is cut short: its header promises {8 + length + end} bytes, the file has {file_size}; "
            "download it again"
        )
    try:
        with safe_open(path, framework="pt"):  # the library that will read it has the last word on its header
            return entries
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a safetensors file this can read ({error}); download it again") from error


def file_stamp(path: Path) -> tuple[int, int]:
    """What changes when a file is written again: its modification time in nanoseconds, and its size."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def read_index(folder: Path, wanted: Callable[[str], bool]) -> Mapping[str, TensorEntry]:
    """Tensors of one component: ``*.safetensors.index.json`` with its shards, or the only ``.safetensors`` file.

    wanted: keys that will be read; shards that hold none of them need not be there.
    Raises CheckpointError, naming files and keys, when a shard is missing or cut short, or when the index and the
    shards disagree.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give a checkpoint in the official layout")
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if len(indexes) > 1:
        raise CheckpointError(f"{folder} has {len(indexes)} index files ({_names(indexes)}); keep one")
    if indexes:
        return _read_sharded(folder, indexes[0], wanted)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        found = _names(files) if files else "none"
        raise CheckpointError(f"{folder} needs an index or exactly one .safetensors file; found {found}")
    return {key: entry for key, entry in read_header(files[0]).items() if wanted(key)}


def read_entries(path: Path, wanted: Callable[[str], bool]) -> Mapping[str, TensorEntry]:
    """Tensors of a component that is one file, or a folder as ``read_index`` reads it."""
    if path.is_dir():
        return read_index(path, wanted)
    return {key: entry for key, entry in read_header(path).items() if wanted(key)}


def read_keys(path: Path) -> frozenset[str]:
    """All keys of a component, read or not: of a file's header, or of a folder's index. Raises as ``read_index``."""
    indexes = sorted(path.glob("*.safetensors.index.json")) if path.is_dir() else []
    if len(indexes) == 1:  # its shards need not all be there
        return frozenset(_weight_map(indexes[0]))
    return frozenset(read_entries(path, lambda key: True))


def fingerprint(folder: Path) -> str:
    """Another text when a config, a vocabulary or weights of the checkpoint were changed; no content is read.

    Of a file it follows the file.
    """
    digest = hashlib.sha256()
    if folder.is_file():
        return hashlib.sha256(f"{file_stamp(folder)}".encode()).hexdigest()
    depths = ("*", "*/*", "*/*/*", "*/*/*/*")  # "**" would not enter linked folders
    files = (path for pattern in depths for path in folder.glob(pattern) if path.suffix in SUFFIXES)
    for path in sorted(files):
        try:
            stamp = file_stamp(path)
        except OSError:  # it went away in between, or is a dangling link
            continue
        digest.update(f"{path.relative_to(folder)} {stamp}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _read_sharded(folder: Path, index: Path, wanted: Callable[[str], bool]) -> dict[str, TensorEntry]:
    weight_map = {key: shard for key, shard in _weight_map(index).items() if wanted(key)}
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if Path(shard).name != shard:
            raise CheckpointError(f"{index} names a shard outside its folder: {shard!r}")
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    if absent:
        raise CheckpointError(
            f"{folder} lacks {len(absent)} of {len(shards)} shards: {some_of(absent)}; download the missing files"
        )
    headers = {shard: read_header(folder / shard) for shard in shards}
    unknown = sorted(name for name, shard in weight_map.items() if name not in headers[shard])
    if unknown:
        raise CheckpointError(
            f"{index} promises {some_of(unknown)}, which {weight_map[unknown[0]]} does not hold; "
            "index and shards are of different downloads"
        )
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map; download it again")
    return weight_map


def some_of(names: list[str], most: int = 3) -> str:
    """The first names and the number of the others, for a message."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _names(paths: list[Path]) -> str:
    return some_of([path.name for path in paths])
