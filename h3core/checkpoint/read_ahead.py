"""Tensors of files, in order, while several threads read the next ones.

Files are read in pieces: a part of a large tensor, or many small tensors. On the CPU a thread reads straight into the
memory of the tensor. For another device it reads into one of ``NUM_AHEAD`` buffers that are used again and again
(pinned for CUDA), which the caller's thread then copies to the device. So at most ``NUM_AHEAD * PIECE_BYTES``,
256 MiB, of what the caller does not have yet is held in host memory, however large the tensors are; on the CPU the
tensor that is being completed comes on top. PyTorch keeps the pinned buffers for the next component.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from comfyui_h3.h3core.checkpoint.index import TensorEntry, file_stamp, shown
from comfyui_h3.h3core.errors import CheckpointError

PIECE_BYTES = 16 << 20
PIECE_TENSORS = 1024
NUM_AHEAD = 16  # pieces that are read or wait for the caller
NUM_THREADS = max(2, min(8, os.cpu_count() or 2))
HUGE_PAGES_BYTES = 4 << 20  # from where on a tensor on the host asks for huge pages

_LIBC = ctypes.CDLL(None) if hasattr(mmap, "MADV_HUGEPAGE") else None

Named = tuple[str, TensorEntry]


def read_ahead(tensors: Sequence[Named], device: torch.device) -> Generator[tuple[str, Tensor], None, None]:
    """Names and tensors on ``device`` as the files hold them, in the order given; fastest in that of the files.

    Each has memory of its own, which does not follow the file. Closing the iterator stops the reading and ends its
    threads. Raises CheckpointError, naming file and key, when a file cannot be read, ends early, or is not the one
    whose header was read.
    """
    landing: _Landing = _OnHost() if device.type == "cpu" else _OnDevice(device)
    pieces = _pieces(tensors)
    ahead: deque[_Piece] = deque()
    with _Readers(NUM_THREADS) as readers:
        while True:
            while len(ahead) < NUM_AHEAD and (piece := next(pieces, None)):
                piece.targets = landing.place(piece)
                readers.submit(piece)
                ahead.append(piece)
            if not ahead:
                return
            piece = ahead.popleft()
            piece.wait()
            yield from landing.land(piece)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Bytes ``begin`` to ``end`` of a tensor."""

    name: str
    entry: TensorEntry
    begin: int
    end: int

    @property
    def is_first(self) -> bool:
        return self.begin == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.entry.num_bytes


@dataclass(slots=True, kw_only=True, eq=False)
class _Piece:
    """What a thread reads at once: parts of one file, and the memory for each."""

    file: Path
    parts: list[_Part]
    targets: list[memoryview] = field(default_factory=list)
    _is_read: threading.Event = field(default_factory=threading.Event)
    _error: BaseException | None = None

    @property
    def num_bytes(self) -> int:
        return sum(part.end - part.begin for part in self.parts)

    def read(self) -> None:
        """Fills the targets; ``wait`` raises what goes wrong."""
        try:
            self._read()
        except BaseException as error:  # of another thread's work, raised where the tensors are waited for
            self._error = error
        finally:
            self._is_read.set()

    def wait(self) -> None:
        self._is_read.wait()
        if isinstance(self._error, OSError):
            raise CheckpointError(
                f"{self.file} cannot be read ({self._error.strerror}); is the checkpoint complete?"
            ) from self._error
        if self._error is not None:
            raise self._error

    def _read(self) -> None:
        with self.file.open("rb", buffering=0) as file:
            self._check_stamp(file.fileno())
            for part, target in zip(self.parts, self.targets, strict=True):
                file.seek(part.entry.offset + part.begin)
                num_read = 0
                while num_read < len(target):
                    count = file.readinto(target[num_read:])
                    if not count:
                        raise CheckpointError(
                            f"{self.file} ends inside {shown(part.name)}: {len(target)} bytes are wanted at "
                            f"{part.entry.offset + part.begin}, {num_read} are there; download it again"
                        )
                    num_read += count
            self._check_stamp(file.fileno())  # nothing was written between the two

    def _check_stamp(self, file: int) -> None:
        if file_stamp(file) != self.parts[0].entry.stamp:
            raise CheckpointError(f"{self.file} was changed after it was opened; run Load H3 again")


def _pieces(tensors: Sequence[Named]) -> Iterator[_Piece]:
    """The bytes of ``tensors`` in order, in pieces of one file, ``PIECE_BYTES`` and ``PIECE_TENSORS`` at most."""
    parts: list[_Part] = []
    room = PIECE_BYTES
    for name, entry in tensors:
        assert entry.offset >= 0, f"{name} is no range of {entry.file}"
        begin = 0
        while True:
            if parts and (room == 0 or len(parts) == PIECE_TENSORS or parts[0].entry.file != entry.file):
                yield _Piece(file=parts[0].entry.file, parts=parts)
                parts, room = [], PIECE_BYTES
            end = min(entry.num_bytes, begin + room)
            parts.append(_Part(name=name, entry=entry, begin=begin, end=end))
            room -= end - begin
            begin = end
            if end == entry.num_bytes:
                break
    if parts:
        yield _Piece(file=parts[0].entry.file, parts=parts)


class _Landing(Protocol):
    """Where pieces are read to. Both methods are called in the order of the pieces, by the caller's thread."""

    def place(self, piece: _Piece) -> list[memoryview]:
        """Memory for each part; at most ``NUM_AHEAD`` pieces have theirs at a time."""

    def land(self, piece: _Piece) -> Iterator[tuple[str, Tensor]]:
        """Of a piece that is read, the tensors that are complete now."""


class _OnHost:
    """Each part lies in the tensor itself."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def place(self, piece: _Piece) -> list[memoryview]:
        targets = []
        for part in piece.parts:
            if part.is_first:
                self._tensors[part.name] = _empty(part.entry, torch.device("cpu"))
                _advise_huge_pages(self._tensors[part.name])
            targets.append(_bytes(self._tensors[part.name]).numpy().data[part.begin : part.end])
        return targets

    def land(self, piece: _Piece) -> Iterator[tuple[str, Tensor]]:
        piece.targets.clear()
        for part in piece.parts:
            if part.is_last:
                yield part.name, self._tensors.pop(part.name)


class _OnDevice:
    """Each piece lies in a buffer, which is used again when its copy to the device has ended."""

    def __init__(self, device: torch.device):
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._free: list[tuple[Tensor, torch.cuda.Event | None]] = []
        self._used: deque[Tensor] = deque()
        self._tensor: Tensor | None = None  # which is not complete

    def place(self, piece: _Piece) -> list[memoryview]:
        if self._free:
            buffer, copied = self._free.pop(0)
            if copied is not None:
                copied.synchronize()
        else:
            buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=self._is_cuda)
        self._used.append(buffer)
        targets, begin, memory = [], 0, buffer.numpy().data
        for part in piece.parts:
            targets.append(memory[begin : begin + part.end - part.begin])
            begin += part.end - part.begin
        return targets

    def land(self, piece: _Piece) -> Iterator[tuple[str, Tensor]]:
        piece.targets.clear()
        buffer, begin = self._used.popleft(), 0
        for part in piece.parts:
            tensor = _empty(part.entry, self._device) if self._tensor is None else self._tensor
            end = begin + part.end - part.begin
            _bytes(tensor)[part.begin : part.end].copy_(buffer[begin:end], non_blocking=self._is_cuda)
            begin = end
            self._tensor = None if part.is_last else tensor
            if part.is_last:
                yield part.name, tensor
        copied = None
        if self._is_cuda:
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(self._device))
        self._free.append((buffer, copied))


def _empty(entry: TensorEntry, device: torch.device) -> Tensor:
    return torch.empty(entry.shape, dtype=entry.dtype, device=device)


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, (num_bytes,) uint8."""
    return tensor.view(-1).view(torch.uint8)


def _advise_huge_pages(tensor: Tensor) -> None:
    """Asks Linux for pages of 2 MiB: memory that is new costs more time page by page than what is read into it."""
    if _LIBC is None or tensor.nbytes < HUGE_PAGES_BYTES:
        return
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (tensor.data_ptr() + tensor.nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)  # advice: may be refused


class _Readers:
    """Threads that read pieces, the first submitted first. They end with the ``with``, without what is not begun.

    They are daemons: a process that leaves does not wait for a disk.
    """

    def __init__(self, num_threads: int):
        self._pieces: SimpleQueue[_Piece | None] = SimpleQueue()
        self._stops = False
        self._threads = [
            threading.Thread(target=self._run, name=f"h3-read-{index}", daemon=True) for index in range(num_threads)
        ]

    def submit(self, piece: _Piece) -> None:
        self._pieces.put(piece)

    def _run(self) -> None:
        while (piece := self._pieces.get()) is not None:
            if not self._stops:
                piece.read()

    def __enter__(self) -> _Readers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stops = True
        for _ in self._threads:
            self._pieces.put(None)
        for thread in self._threads:
            thread.join()  # each has one piece at most to end; its memory must not go away before
