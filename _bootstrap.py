"""One import name, ``comfyui_h3``, for the host, the workers, the tests and the command line.

A host loads a pack under its folder path as module name, so the same class would have two names and could not be
imported from a worker. ``register`` makes ``comfyui_h3`` mean this folder; all imports of the pack are absolute.

    python _bootstrap.py h3core.tiny --out DIR     runs a module of a clone that is not installed
"""

import importlib.machinery
import importlib.util
import os
import runpy
import sys

NAME = "comfyui_h3"
ROOT = os.path.dirname(os.path.abspath(__file__))


def register() -> None:
    """Make ``comfyui_h3`` mean this folder; raise ImportError when it already means another one."""
    # On sys.path this folder would hide the PyPI package `kernels` (transformers looks for it) and the host's `nodes`.
    sys.path[:] = [p for p in sys.path if os.path.realpath(p or ".") != os.path.realpath(ROOT)]
    loaded = sys.modules.get(NAME)
    if loaded is None:
        spec = importlib.machinery.ModuleSpec(NAME, None, is_package=True)
        spec.submodule_search_locations = [ROOT]
        sys.modules[NAME] = importlib.util.module_from_spec(spec)
        return
    other = next(iter(loaded.__path__), None)
    if other is None or os.path.realpath(other) != os.path.realpath(ROOT):
        raise ImportError(
            f"ComfyUI-H3 is installed twice: {other} is loaded, {ROOT} is not. Remove one of the two folders."
        )


if __name__ == "__main__":
    register()
    sys.argv = sys.argv[1:]
    runpy.run_module(f"{NAME}.{sys.argv[0]}", run_name="__main__", alter_sys=True)
