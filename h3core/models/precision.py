"""fp32 that is fp32: no TF32, and the same kernels in every call: for the fp32 parts of all models."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def exact_fp32(*, cudnn: bool = True) -> Iterator[None]:
    """Matrix products and convolutions in full fp32, deterministic, inside the block; no effect on a CPU.

    ``cudnn=False`` keeps cuDNN out altogether, as the reference does where it encodes sound. What the host had set
    holds again after the block.
    """
    matmul: Any = torch.backends.cuda.matmul
    backend: Any = torch.backends.cudnn
    # Since 2.9 torch has a second interface for TF32, and complains when the two disagree: for products both are set
    # (the older setter writes both), for convolutions only the newer is read.
    has_both = hasattr(matmul, "fp32_precision")
    settings: list[tuple[Any, str, Any]] = [
        (backend, "enabled", cudnn),
        (backend, "benchmark", False),
        (backend, "deterministic", True),
        (matmul, "allow_tf32", False),
        (backend.conv, "fp32_precision", "ieee") if has_both else (backend, "allow_tf32", False),
    ]
    before = [(owner, name, _read(owner, name)) for owner, name, _ in settings]
    if hasattr(matmul, "allow_fp16_accumulation"):  # a host's "fast" mode; the video decoder's products are float16
        settings.append((matmul, "allow_fp16_accumulation", False))
        before.append((matmul, "allow_fp16_accumulation", matmul.allow_fp16_accumulation))
    if has_both:
        before.append((matmul, "fp32_precision", matmul.fp32_precision))
    try:
        for owner, name, value in settings:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            if value is not None:
                setattr(owner, name, value)


def _read(owner: Any, name: str) -> Any:
    """The setting, or None where the host uses the newer interface and torch refuses to read the older."""
    try:
        return getattr(owner, name)
    except RuntimeError:
        return None
