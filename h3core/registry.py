"""One engine per configuration and process: two Load H3 nodes with the same settings share their weights."""

from __future__ import annotations

import threading
from weakref import WeakValueDictionary

from comfyui_h3.h3core.config import EngineConfig
from comfyui_h3.h3core.engine import Engine

_engines: WeakValueDictionary[EngineConfig, Engine] = WeakValueDictionary()
_lock = threading.Lock()


def get_engine(config: EngineConfig) -> Engine:
    """The live engine of ``config``, or a new one. It lives, with its weights, as long as somebody holds it."""
    with _lock:
        engine = _engines.get(config)
        if engine is None:
            engine = _engines[config] = Engine(config)
        return engine
