"""Reading config files: every key is known by name, and every value has the type of the release's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any, TypeGuard

from comfyui_h3.h3core.errors import CheckpointError


def check_fields(
    values: Any, source: str, *, like: Mapping[str, Any], fixed: Mapping[str, Any], ignored: Set[str] = frozenset()
) -> None:
    """Checks one JSON object of a config.

    like: keys that are read -> an example of their value; numbers must be positive, those in lists finite.
    fixed: keys with one supported value. ignored: keys that change nothing here, as do those that begin with "_".
    Raises CheckpointError naming ``source`` and the key for one that is missing, unknown, or of another type or value.
    """
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{source} is {type(values).__name__}, not a JSON object; take the file of the release")
    missing = sorted((like.keys() | fixed.keys()) - values.keys())
    if missing:
        raise CheckpointError(f"{source} lacks {', '.join(missing)}; take the file of the release")
    unknown = sorted(k for k in values.keys() - fixed.keys() - like.keys() - ignored if not k.startswith("_"))
    if unknown:
        raise CheckpointError(f"{source} has keys this version does not know: {', '.join(unknown)}")
    for key, value in fixed.items():
        if values[key] != value:
            raise CheckpointError(f"{source}: {key}={values[key]!r} is not supported, only {value!r} is")
    for key, example in like.items():
        if not _is_like(values[key], example):
            raise CheckpointError(
                f"{source}: {key}={values[key]!r} is not a value like {example!r}, as the release has"
            )


def is_positive(value: Any) -> TypeGuard[int | float]:
    """Whether a JSON value is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _is_like(value: Any, example: Any) -> bool:
    if isinstance(example, list):
        signed = isinstance(example[0], float)  # statistics may be negative; lists of sizes are integers
        return (
            isinstance(value, list)
            and bool(value)
            and all(_is_finite(item) if signed else isinstance(item, int) and item >= 0 for item in value)
        )
    if isinstance(example, float):
        return is_positive(value)
    if isinstance(example, int):
        return isinstance(value, int) and is_positive(value)
    return isinstance(value, type(example))


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
