"""How long each stage took: CUDA events on a GPU, the monotonic clock elsewhere, read once at the end of the stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """One stage: its name, its seconds, and how many equal units (forwards, tiles, frames) they hold."""

    name: str
    seconds: float
    num_units: int = 1


@dataclass(frozen=True, slots=True)
class Timings:
    """Stages in the order they ran. Every result carries those of the results it was made from."""

    stages: tuple[StageTime, ...] = ()

    def __add__(self, other: Timings) -> Timings:
        """Both, without counting a stage twice that both results share (video and audio of one sampling)."""
        return Timings(self.stages + tuple(stage for stage in other.stages if stage not in self.stages))


class StageTimer:
    """Collects the stages of one call: ``with timer.stage("sample", num_units=49): ...``."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stages: list[StageTime] = []

    @contextmanager
    def stage(self, name: str, num_units: int = 1) -> Iterator[None]:
        """Times the block. On CUDA the device's own events are used, so that the loop inside never waits for them."""
        if self._device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(torch.cuda.current_stream(self._device))
            yield
            end.record(torch.cuda.current_stream(self._device))
            end.synchronize()
            seconds = begin.elapsed_time(end) / 1e3
        else:
            start = time.perf_counter()
            yield
            seconds = time.perf_counter() - start
        self._stages.append(StageTime(name=name, seconds=seconds, num_units=num_units))

    @property
    def timings(self) -> Timings:
        return Timings(tuple(self._stages))
