"""Launch parameters: constants checked in beside each kernel, chosen by compute capability.

They are not searched for at run time: all ranks run the same code, and timings repeat. The values of (9, 0) are the
best of a sweep on an H200 at the shapes of benchmarks/ops.py; those of ``None`` are the same, untried elsewhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """block: columns, or heads, that one program computes; num_warps: warps of 32 threads that share them."""

    block: int
    num_warps: int


@lru_cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """(major, minor) of a CUDA device."""
    return torch.cuda.get_device_capability(device)


def pick(table: Mapping[tuple[int, int] | None, Launch], device: torch.device) -> Launch:
    """The entry of ``device``'s compute capability, else the entry of ``None``."""
    key = compute_capability(device) if device.type == "cuda" else None
    return table.get(key, table[None])
