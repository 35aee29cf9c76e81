"""Safetensors on disk: which file holds which tensor, checked from the headers before any weight is read."""

from __future__ import annotations

import hashlib
import json
import math
import os
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from comfyui_h3.h3core.checkpoint.diagnosis import download_control, other_format, unfinished
from comfyui_h3.h3core.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format itself
MAX_HEADER_ALONE_BYTES = 16 << 20  # of one that is more than an eighth of its file: weights outweigh their names
MAX_JSON_BYTES = 64_000_000
MAX_PARSED_BYTES = 64 << 20  # memory for the values of a text, in a file of less than half that
BYTES_PER_VALUE = 200  # the most that Python takes for a value of a few characters, with its place in a list or dict
MAX_DIMS = 16

SUFFIXES = (".json", ".safetensors", ".txt")  # files that change what a checkpoint does

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": getattr(torch, "float8_e8m0fnu", torch.uint8),  # powers of two; the same bytes before torch 2.7
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

_SHORT = reprlib.Repr()
_SHORT.maxlist = MAX_DIMS
_SHORT.maxstring = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where one tensor is, and what its file says of it."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    stamp: tuple[int, int]  # modification time and size of the file when its header was read
    offset: int = -1  # of its first byte in the file; -1 for what no range of a file holds as it is

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Offset of the byte behind it."""
        return self.offset + self.num_bytes


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a checkpoint. Raises CheckpointError when it is absent, huge, ambiguous, or not one."""
    try:
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path} is not a file; download it again")
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is larger than {MAX_JSON_BYTES} bytes: not a config file of a checkpoint")
        values = _parse(path.read_bytes(), MAX_PARSED_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); is the checkpoint complete?") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds {type(values).__name__}, not a JSON object; download it again")
    return values


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Tensors of one ``.safetensors`` file, checked without reading them and without memory of their size.

    Raises CheckpointError, naming file and key, for a file that is absent, cut short or malformed: by the rules of the
    format (README of safetensors, "Format"), ranges neither overlap nor leave holes and no key is there twice.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise CheckpointError(f"{path} is not a file; download it again")
        if control := download_control(path):
            raise CheckpointError(f"{path} is still being downloaded, says {control.name} beside it; let that end")
        stamp = file_stamp(path)
        with path.open("rb") as file:
            start = file.read(64)
            length = _header_length(path, start, stamp[1])
            file.seek(8)
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); is the checkpoint complete?") from error
    if len(raw) < length:
        raise CheckpointError(f"{path} was changed while it was read; run Load H3 again")
    try:
        header = _parse(raw, max(MAX_PARSED_BYTES, 2 * stamp[1]))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has a malformed header ({error}); download it again") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a malformed header ({type(header).__name__}); download it again")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, value, 8 + length, stamp) for name, value in header.items()}
    _check_ranges(path, entries, 8 + length, stamp[1])
    try:
        with safe_open(path, framework="pt"):  # what else the format's own library wants, as of the metadata
            return entries
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a safetensors file this can read ({error}); download it again") from error


def _header_length(path: Path, start: bytes, file_size: int) -> int:
    """Bytes of the JSON that follows the first 8, which hold their number; ``start`` is how the file begins."""
    length = int.from_bytes(start[:8], "little")
    largest = min(MAX_HEADER_BYTES, max(MAX_HEADER_ALONE_BYTES, file_size // 8))
    if len(start) > 8 and length <= min(largest, file_size - 8) and start[8:9] == b"{":
        return length
    if other := other_format(start):
        raise CheckpointError(f"{path} is not a safetensors file but {other}")
    if len(start) < 8 or file_size - 8 < length <= largest:
        promise = f"its first 8 bytes promise a header of {length} bytes" if len(start) >= 8 else "it lacks a header"
        raise CheckpointError(
            f"{path} is cut short: {promise}, the file has {file_size}; download it again{_unfinished(path.parent)}"
        )
    found = f"promises a header of {length} bytes, {largest} are allowed" if length > largest else "no header"
    raise CheckpointError(f"{path} is not a safetensors file ({found}); download it again")


def _entry(path: Path, name: str, value: object, begin: int, stamp: tuple[int, int]) -> TensorEntry:
    """One tensor of a header; the ranges there count from ``begin``."""
    where = f"{path}: {shown(name)}"
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise CheckpointError(
            f"{where} is described as {shown(value)}; wanted an object with dtype, shape and data_offsets; "
            "download it again"
        )
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"{where} has the dtype {shown(dtype)}, which is not supported; this version reads {', '.join(DTYPES)}"
        )
    if not _are_sizes(shape) or len(shape) > MAX_DIMS or math.prod(max(side, 1) for side in shape) >= 2**60:
        raise CheckpointError(
            f"{where} has the shape {shown(shape)}; wanted at most {MAX_DIMS} whole numbers from 0 on, below 2**60 "
            "together; download it again"
        )
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{where} has the range {shown(offsets)}; wanted the whole numbers [begin, end]; download it again"
        )
    entry = TensorEntry(file=path, shape=tuple(shape), dtype=DTYPES[dtype], stamp=stamp, offset=begin + offsets[0])
    if offsets[1] - offsets[0] != entry.num_bytes:
        raise CheckpointError(
            f"{where} is {dtype} {shape}, {entry.num_bytes} bytes, but has the range {offsets}, "
            f"{offsets[1] - offsets[0]} bytes; download it again"
        )
    return entry


def _check_ranges(path: Path, entries: Mapping[str, TensorEntry], begin: int, file_size: int) -> None:
    """Raises CheckpointError unless the tensors fill the file from ``begin`` on, one after the other."""
    end, last = begin, "the header"
    last_end = max((entry.end for entry in entries.values()), default=begin)
    if last_end > file_size:
        beyond = shown(next(name for name, entry in entries.items() if entry.end > file_size))
        raise CheckpointError(
            f"{path} is cut short: its header promises {last_end} bytes, the file has {file_size} and ends before "
            f"{beyond} does; download it again{_unfinished(path.parent)}"
        )
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].end)):
        if entry.offset != end:
            problem = "overlaps" if entry.offset < end else "leaves a hole behind"
            raise CheckpointError(
                f"{path}: {shown(name)} {problem} {last}: it begins at byte {entry.offset}, {end} is wanted; "
                "download it again"
            )
        end, last = entry.end, shown(name)
    if end != file_size:
        raise CheckpointError(
            f"{path} has {file_size} bytes, its header describes {end}, up to the end of {last}; download it again"
        )


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _parse(raw: bytes, max_bytes: int) -> Any:
    """Values of a JSON text in UTF-8. Raises ValueError or RecursionError, also for a key that an object holds twice,
    and for a text whose values would take more than ``max_bytes`` of memory."""
    num_values = _num_values(raw)
    if num_values * BYTES_PER_VALUE > max_bytes:
        raise ValueError(f"{num_values} values, {max_bytes // BYTES_PER_VALUE} are allowed")
    return json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_int=_integer)


def _num_values(raw: bytes) -> int:
    """Values in a JSON text, nearly: its commas and opening brackets outside of strings."""
    text = np.frombuffer(raw.replace(b"\\\\", b"").replace(b'\\"', b""), dtype=np.uint8)
    outside = np.cumsum(text == ord('"'), dtype=np.uint8) % 2 == 0  # 256 is even: a carry changes nothing
    return sum(int(np.count_nonzero((text == ord(mark)) & outside)) for mark in ",[{")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {shown(key)} is there more than once")
    return values


def _integer(digits: str) -> int:
    if len(digits) > 20:  # more than 64 bits, and Python's time grows with the square
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def file_stamp(file: Path | int) -> tuple[int, int]:
    """What changes when a file (a path or an open one) is written again: its modification time in ns, and its size."""
    status = os.stat(file)
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
        raise CheckpointError(
            f"{folder} needs an index or exactly one .safetensors file; found {found}{_unfinished(folder)}"
        )
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
            raise CheckpointError(f"{index} names a shard outside its folder: {shown(shard)}")
    try:
        absent = [shard for shard in shards if not (folder / shard).is_file()]
    except OSError as error:  # a name that no file can have
        raise CheckpointError(f"{index} names shards that cannot be looked for ({error.strerror})") from error
    if absent:
        raise CheckpointError(
            f"{folder} lacks {len(absent)} of {len(shards)} shards: {some_of(absent)}; download the missing files"
            f"{_unfinished(folder)}"
        )
    headers = {shard: read_header(folder / shard) for shard in shards}
    unknown = sorted(name for name, shard in weight_map.items() if name not in headers[shard])
    if unknown:
        raise CheckpointError(
            f"{index} promises {some_of(unknown)}, which {shown(weight_map[unknown[0]])} does not hold; "
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
    return ", ".join(map(shown, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def shown(value: object) -> str:
    """A value of a file for a message: a name as it is, anything else as Python writes it, and never long."""
    if not isinstance(value, str):
        return _SHORT.repr(value)
    text = value[: _SHORT.maxstring]
    return (text if text.isprintable() else ascii(text)) + ("..." if len(value) > len(text) else "")


def _unfinished(folder: Path) -> str:
    """The end of a message about what is missing in ``folder``."""
    found = unfinished(folder)
    return f"; {some_of(found)} shows that a download has not ended" if found else ""


def _names(paths: list[Path]) -> str:
    return some_of([path.name for path in paths])
