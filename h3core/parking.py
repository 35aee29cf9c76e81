"""Where a stage sleeps while its process leaves."""

from __future__ import annotations

import threading
import time

from comfyui_h3.h3core.types import Progress


class Parking:
    """Puts a daemon thread to sleep, for ever, at the next report of its progress.

    A host's prompt thread does not end by itself. One that is inside PyTorch while the interpreter goes away aborts the
    process, and an exception would send it there again: hosts print the tensors of a node that failed.
    """

    def __init__(self) -> None:
        self._leaving, self._parked = threading.Event(), threading.Event()

    def watched(self, callback: Progress | None) -> Progress:
        """``callback``, in which the thread can be parked."""

        def report(done: int, total: int) -> None:
            if self._leaving.is_set():
                self._parked.set()
                threading.Event().wait()
            if callback is not None:
                callback(done, total)

        return report

    def close(self, busy: threading.Lock, timeout_s: float) -> None:
        """Parks whoever holds ``busy``, and waits for that, ``timeout_s`` at most."""
        self._leaving.set()
        deadline = time.monotonic() + timeout_s
        while busy.locked() and not self._parked.wait(0.01) and time.monotonic() < deadline:
            pass
