"""Which weights are on the device: read when a stage needs them, and kept until another stage needs the room."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from comfyui_h3.h3core.checkpoint.loader import num_bytes
from comfyui_h3.h3core.errors import DeviceMemoryError
from comfyui_h3.h3core.memory_plan import MemoryPlan, room_bytes
from comfyui_h3.h3core.types import Progress

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One module: ``build`` makes it on meta, in the dtypes it will have; ``load`` makes it on the device."""

    build: Callable[[], nn.Module]
    load: Callable[[Progress], nn.Module]


def available_host_bytes() -> int | None:
    """Memory the kernel can still give to this process, its control group's limit included; None where it is not told.

    Asking for more does not raise on Linux: the kernel kills a process, often this one.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    group = Path("/sys/fs/cgroup")
    try:
        left = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no limit, or another kind of control group
        return available
    return min(available, max(left, 0))


class Residency:
    """The modules of one engine on one device. Follows the plan of the job at hand in who leaves first."""

    def __init__(self, device: torch.device, sources: Mapping[str, Source]):
        self._device = device
        self._sources = sources
        self._loaded: dict[str, Any] = {}
        self._sizes: dict[str, int] = {}
        self._plan = MemoryPlan()

    def follow(self, plan: MemoryPlan) -> None:
        self._plan = plan

    def get(self, name: str, working_bytes: int, on_load: Progress) -> Any:
        """The module ``name`` on the device, with room for ``working_bytes`` of activations beside it.

        Modules of other stages leave where they must: what is to leave after its stage stays until its room is needed.
        """
        self._make_room(name, working_bytes)
        if name not in self._loaded:
            self._loaded[name] = self._sources[name].load(on_load)
            log.info("%s: %.2f GiB of weights on %s", name, self.weight_bytes(name) / 2**30, self._device)
        return self._loaded[name]

    def missing_bytes(self, name: str, working_bytes: int) -> int:
        """Device memory that ``get`` will take: weights that are not there yet, and activations."""
        return (0 if name in self._loaded else self.weight_bytes(name)) + room_bytes(working_bytes)

    def weight_bytes(self, name: str) -> int:
        """Weights of a module, there or not, in the dtypes it will have."""
        if name not in self._sizes:
            self._sizes[name] = num_bytes(self._sources[name].build())
        return self._sizes[name]

    def capacity_bytes(self) -> int | None:
        """What the modules and their work can have together; None where nobody counts it."""
        if self._device.type != "cuda":
            return None
        return self._free_bytes() + sum(map(self.weight_bytes, self._loaded))

    def clear(self) -> None:
        """Gives all memory back."""
        self._drop(list(self._loaded))

    def _make_room(self, name: str, working_bytes: int) -> None:
        others = self._plan.leave_order(name, self._loaded)
        if self._device.type != "cuda" or not others:
            return
        missing = self.missing_bytes(name, working_bytes)
        for other in others:
            if self._free_bytes() >= missing:
                return
            log.warning("%s leaves %s: %s needs the room", other, self._device, name)
            self._drop([other])

    def _free_bytes(self) -> int:
        """What an allocation can get: free on the device, or kept by PyTorch without use."""
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return torch.cuda.mem_get_info(self._device)[0] + unused

    def _drop(self, names: list[str]) -> None:
        for name in names:
            del self._loaded[name]
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @contextmanager
    def explained(self, stage: str) -> Iterator[None]:
        """Says which stage ran out of device memory, with how much free, and what helps."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self._device)
            held = ", ".join(f"{name} {self.weight_bytes(name) / 2**30:.1f}" for name in self._loaded)
            raise DeviceMemoryError(
                f"{stage} does not fit on {self._device}: {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free, "
                f"weights in GiB: {held or 'none'}; use a smaller size or fewer frames, or free memory others hold"
            ) from error
