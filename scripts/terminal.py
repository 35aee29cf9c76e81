"""Text for a terminal: a line per stage with a progress bar, and a table."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from typing import TextIO

NAME_WIDTH = 24
BAR_WIDTH = 30
MAX_COUNT = 10_000  # a larger total is bytes of weights being read: shown in percent


class StageLines:
    """One line a stage: on a terminal redrawn with a bar, elsewhere written once, when the stage ends."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._live = stream.isatty()
        self._name: str | None = None
        self._done = self._total = 0
        self._started = self._drawn = 0.0
        self._width = 0

    def begin(self, name: str) -> None:
        """End the current stage and start the next."""
        self.end()
        self._name, self._done, self._total = name, 0, 0
        self._started = time.monotonic()
        self._draw()

    def step(self, done: int, total: int) -> None:
        self._done, self._total = done, total
        if time.monotonic() - self._drawn > 0.1 or done == total:
            self._draw()

    def end(self) -> None:
        """Close the line of the current stage, if there is one."""
        if self._name is None:
            return
        self._write("\n")
        self._name = None

    def _draw(self) -> None:
        if self._live and self._name is not None:
            self._drawn = time.monotonic()
            self._write("")

    def _write(self, end: str) -> None:
        line = self._line()
        if self._live:  # over what is there, which may be longer
            self._stream.write(f"\r{line:<{self._width}}{end}")
            self._width = 0 if end else len(line)
        else:
            self._stream.write(line + end)
        self._stream.flush()

    def _line(self) -> str:
        text = f"{self._name or '':<{NAME_WIDTH}}{time.monotonic() - self._started:8.1f} s"
        if self._total:
            filled = BAR_WIDTH * self._done // self._total
            bar = "#" * filled + "." * (BAR_WIDTH - filled)
            is_bytes = self._total > MAX_COUNT
            count = f"{100 * self._done // self._total} %" if is_bytes else f"{self._done}/{self._total}"
            text += f"  [{bar}] {count}"
        return text[: shutil.get_terminal_size().columns - 1] if self._live else text


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as needed; the first is flush left, the others flush right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = []
    for row in (head, ["-" * width for width in widths], *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
