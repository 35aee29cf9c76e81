"""``triton.jit`` for kernels that are called with many sizes."""

from collections.abc import Callable
from typing import Any

from comfyui_h3.kernels._triton import MISSING, triton


def jit_for_any(*names: str) -> Callable[[Any], Any]:
    """Compiles a kernel once for all values of the arguments ``names``.

    Triton otherwise compiles again where an integer is 1, and where it is no multiple of 16: a kernel that runs on
    pictures and clips at six resolutions would be compiled eight times, for a second each.
    """
    return triton.jit if MISSING is not None else triton.jit(do_not_specialize=list(names))
