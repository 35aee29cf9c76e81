"""What a user types into one field -> the parts a builder takes: shots as paragraphs, labels as lines."""

from __future__ import annotations

import re

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.prompt.builder import Shot
from comfyui_h3.h3core.prompt.findings import excerpt

_PARAGRAPH_END = re.compile(r"(?:\r\n|\r|\n)[ \t]*(?:\r\n|\r|\n)\s*")
_CLOCK = re.compile(r"(?:At\s{1,3})?(\d{1,2}):(\d{2})(?:\.(\d{1,3}))?(?:\s*,\s*|\s+|$)", re.IGNORECASE)
_SECONDS = re.compile(r"(?:At\s{1,3})?(\d{1,3})(?:\.(\d{1,3}))?\s?s(?:\s*,\s*|\s+|$)", re.IGNORECASE)
_CLOCKLIKE = re.compile(r"(?:At\s{1,3})?\d{1,3}:\d", re.IGNORECASE)


def read_shots(text: str) -> tuple[Shot, ...]:
    """One shot a paragraph, a blank line between them; all but the first begin with the time of their cut.

    Times are ``00:03.200`` or ``3.2 s``. Raises RequestError for a time that cannot be read.
    """
    return tuple(_shot(paragraph) for paragraph in _PARAGRAPH_END.split(text.strip()) if paragraph)


def _shot(paragraph: str) -> Shot:
    clock = _CLOCK.match(paragraph)
    if clock:
        if int(clock[2]) >= 60:
            raise RequestError(
                f"{excerpt(clock[0].strip())} has {clock[2]} seconds; write minutes:seconds, 00:00 to 00:59"
            )
        return Shot(
            text=paragraph[clock.end() :],
            start_ms=int(clock[1]) * 60_000 + int(clock[2]) * 1000 + _milliseconds(clock[3]),
        )
    seconds = _SECONDS.match(paragraph)
    if seconds:
        return Shot(text=paragraph[seconds.end() :], start_ms=int(seconds[1]) * 1000 + _milliseconds(seconds[2]))
    if _CLOCKLIKE.match(paragraph):
        raise RequestError(f"{excerpt(paragraph, 20)} begins with no time that can be read; write 00:03.200 or 3.2 s")
    return Shot(text=paragraph)


def _milliseconds(decimals: str | None) -> int:
    return int((decimals or "0").ljust(3, "0"))


def read_lines(text: str) -> tuple[str, ...]:
    """The lines that are not blank, without the spaces around them."""
    return tuple(line.strip() for line in re.split(r"[\r\n]+", text) if line.strip())


def read_task_types(text: str) -> tuple[str, ...]:
    """Task types with ``+`` or a comma between them, in brackets or without."""
    bare = text.strip().removeprefix("[").removesuffix("]")
    return tuple(name.strip() for name in re.split(r"[+,\r\n]", bare) if name.strip())
