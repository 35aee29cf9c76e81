"""What became of the keys of a LoRA file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedKey:
    """A key that names a parameter and cannot be merged into it, and why."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraReport:
    """One file at one strength. ignored: keys that name no parameter of the transformer.

    families: whose spellings its keys have. notes: what was decided where the file does not say it.
    """

    path: Path
    strength: float
    families: tuple[str, ...]
    applied: tuple[str, ...]
    ignored: tuple[str, ...]
    failed: tuple[FailedKey, ...]
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        """One line: the file, its strength and the counts."""
        counts = f"{len(self.applied)} keys applied, {len(self.ignored)} ignored, {len(self.failed)} failed"
        notes = "".join(f"; {note}" for note in self.notes)
        return f"LoRA {self.path.name} x {self.strength:g} ({' and '.join(self.families)}: {counts}{notes})"
