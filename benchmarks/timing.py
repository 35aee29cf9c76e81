"""How calls are timed: by the GPU's events, or by the clock on the wall."""

import statistics
import time
from collections.abc import Callable

import torch


def gpu_ms(call: Callable[[], object], repeats: int = 5) -> float:
    """Median milliseconds from the start to the end of a call on the GPU, after one call that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def wall_seconds(call: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call until the GPU has done all of it, after one call that is not counted."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])
