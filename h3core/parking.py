"""Where a stage sleeps while its process leaves.

A host's prompt thread is a daemon and does not end by itself. One that is inside PyTorch or FFmpeg while the
interpreter goes away aborts the process, and an exception would send it there again: hosts print the tensors of a node
that failed. So it sleeps, for ever, at the next report of its progress.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from comfyui_h3.h3core.types import Progress

TIMEOUT_S = 2.0  # of a forward that takes longer, the abort is the host's to live with


class Parking:
    """The stages that run in this process, and the place where they stop."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._leaving = False
        self._num_running = self._num_parked = 0

    @contextmanager
    def stage(self) -> Iterator[None]:
        """Around the work of one stage, whose progress is ``watched``."""
        with self._changed:
            if self._num_running == 0:
                atexit.unregister(self.close)  # registered once, and only in a process that has run a stage
                atexit.register(self.close)
            self._num_running += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_running -= 1
                self._changed.notify_all()

    def watched(self, callback: Progress | None) -> Progress:
        """``callback``, in which a stage is parked once the process leaves."""

        def report(done: int, total: int) -> None:
            if self._leaving:
                with self._changed:
                    self._num_parked += 1
                    self._changed.notify_all()
                threading.Event().wait()
            if callback is not None:
                callback(done, total)

        return report

    def close(self) -> None:
        """Parks every running stage, and waits for that, ``TIMEOUT_S`` at most."""
        deadline = time.monotonic() + TIMEOUT_S
        with self._changed:
            self._leaving = True
            while self._num_parked < self._num_running and self._changed.wait(deadline - time.monotonic()):
                pass


PARKING = Parking()
