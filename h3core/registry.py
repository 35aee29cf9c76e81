"""One engine per configuration and process: two Load H3 nodes with the same settings share their weights."""

from __future__ import annotations

import threading
from weakref import WeakValueDictionary

from comfyui_h3.h3core.checkpoint.index import fingerprint
from comfyui_h3.h3core.config import EngineConfig
from comfyui_h3.h3core.engine import Engine

_engines: WeakValueDictionary[tuple[EngineConfig, tuple[str, ...]], Engine] = WeakValueDictionary()
_lock = threading.Lock()


def get_engine(config: EngineConfig) -> Engine:
    """The live engine of ``config`` and of the files as they are now, or a new one.

    It lives, with its weights, as long as somebody holds it. An engine of files that were replaced since is not given
    out again.
    """
    with _lock:
        paths = [config.checkpoint, *(source.path for source in config.components if source.path is not None)]
        paths += [lora.path for lora in config.loras]
        key = (config, tuple(fingerprint(path) for path in paths))
        engine = _engines.get(key)
        if engine is None:
            engine = _engines[key] = Engine(config)
        return engine
