"""One engine per configuration and process: two Load H3 nodes with the same settings share their weights."""

from __future__ import annotations

import atexit
import threading
from weakref import WeakValueDictionary

from comfyui_h3.h3core.checkpoint.index import fingerprint
from comfyui_h3.h3core.config import EngineConfig
from comfyui_h3.h3core.engine import Engine

_engines: WeakValueDictionary[tuple[EngineConfig, str], Engine] = WeakValueDictionary()
_lock = threading.Lock()
PARK_TIMEOUT_S = 2.0


def get_engine(config: EngineConfig) -> Engine:
    """The live engine of ``config`` and of the files as they are now, or a new one.

    It lives, with its weights, as long as somebody holds it. An engine of files that were replaced since is not given
    out again.
    """
    with _lock:
        atexit.unregister(_park_all)  # registered once, and only in a process that has engines
        atexit.register(_park_all)
        key = (config, fingerprint(config.checkpoint))
        engine = _engines.get(key)
        if engine is None:
            engine = _engines[key] = Engine(config)
        return engine


def _park_all() -> None:
    """At exit: a host's prompt thread does not end by itself, and may be in the middle of a stage."""
    for engine in list(_engines.values()):
        engine.park(PARK_TIMEOUT_S)
