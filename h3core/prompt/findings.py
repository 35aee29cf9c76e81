"""What a check found, and how it is shown."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from comfyui_h3.h3core.media.canvas import FPS

ERROR, WARNING = "error", "warning"
SHOWN_PER_CODE = 5  # a text with 10,000 broken markers has one problem, not 10,000


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """level: "error" or "warning". code: stable ASCII id. message: what, and what to do. line: from 1; None: all."""

    level: str
    code: str
    message: str
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.level}: {self.where}{self.message} [{self.code}]"

    @property
    def where(self) -> str:
        return "" if self.line is None else f"line {self.line}: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Findings in the order of the text, errors first. num_tokens: None when no tokenizer was at hand."""

    mode: str
    num_frames: int
    findings: tuple[Finding, ...] = ()
    num_characters: int = 0
    num_tokens: int | None = None

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level == ERROR)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level == WARNING)

    def headline(self) -> str:
        """One short line."""
        found = [counted(len(self.errors), "error"), counted(len(self.warnings), "warning")]
        tokens = "" if self.num_tokens is None else f", {counted(self.num_tokens, 'token')}"
        return f"{', '.join(found)}; {counted(self.num_characters, 'character')}{tokens}"

    def text(self) -> str:
        """Everything, one line each; of many findings of one kind the first few."""
        lines = [f"{self.headline()}; {self.mode}, {self.num_frames} frames ({self.num_frames / FPS:.2f} s)"]
        shown: Counter[str] = Counter()
        for finding in self.findings:
            shown[finding.code] += 1
            if shown[finding.code] <= SHOWN_PER_CODE:
                lines.append(str(finding))
        lines += [f"and {n - SHOWN_PER_CODE} more [{code}]" for code, n in shown.items() if n > SHOWN_PER_CODE]
        return "\n".join(lines)


def error(code: str, message: str, line: int | None = None) -> Finding:
    return Finding(level=ERROR, code=code, message=message, line=line)


def warning(code: str, message: str, line: int | None = None) -> Finding:
    return Finding(level=WARNING, code=code, message=message, line=line)


def excerpt(text: str, length: int = 60) -> str:
    """``text`` in quotes on one line, short, and safe to print: it may hold anything that a user can paste."""
    short = text if len(text) <= length else text[: length - 1] + "…"
    return "'" + "".join(c if c.isprintable() and not "\ud800" <= c <= "\udfff" else _escaped(c) for c in short) + "'"


def _escaped(letter: str) -> str:
    return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(letter, f"U+{ord(letter):04X}")


def counted(number: int, noun: str) -> str:
    """``1 error``, ``2 errors``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
