"""One way to write schemas for hosts of different age."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

DISPENSABLE = frozenset({"advanced", "search_aliases"})
"""Arguments that only change how a node is shown or found. Hosts before 0.33 do not know them."""


def make(factory: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """``factory(*args, **kwargs)`` without the dispensable arguments that this host's ``factory`` does not know."""
    known = inspect.signature(factory).parameters
    return factory(*args, **{name: value for name, value in kwargs.items() if name in known or name not in DISPENSABLE})
