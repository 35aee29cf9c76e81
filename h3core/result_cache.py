"""Results of encoders, kept by what went in: the same prompt or picture is not encoded twice."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor


def key_of(*parts: object) -> str:
    """SHA-256 over the parts: of a tensor its dtype, shape and bytes, of anything else its ``repr``."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            digest.update(f"{part.dtype} {tuple(part.shape)}\n".encode())
            for piece in part if part.ndim > 1 else (part,):  # frame by frame: a clip is a gigabyte
                digest.update(piece.contiguous().numpy().data)
        else:
            digest.update(f"{part!r}\n".encode())
    return digest.hexdigest()


class ResultCache:
    """Tensors on the CPU by key; the longest unused leave when there are more than ``max_bytes`` of them."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._results: OrderedDict[str, tuple[Tensor, ...]] = OrderedDict()

    def get(self, key: str, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """The result of ``key``, made when it is not there. Nothing may write into it."""
        if key not in self._results:
            self._results[key] = make()
        self._results.move_to_end(key)
        while self.num_bytes > self._max_bytes and len(self._results) > 1:
            self._results.popitem(last=False)
        return self._results[key]

    def __contains__(self, key: str) -> bool:
        return key in self._results

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for result in self._results.values() for tensor in result)

    def clear(self) -> None:
        self._results.clear()
