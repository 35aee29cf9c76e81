"""Which implementation of an operation runs: its Triton kernel, or its torch reference.

The choice is a predicate on backend, device, dtype and layout, logged once per operation and reason. It is never an
attempt with a fallback: a kernel that was chosen and fails raises.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from comfyui_h3.kernels._triton import INTERPRETED, MISSING, TensorDescriptor
from comfyui_h3.kernels.launch import compute_capability

log = logging.getLogger(__name__)

BACKENDS = ("auto", "triton", "torch")

_backend: ContextVar[str] = ContextVar("comfyui_h3_kernel_backend", default="auto")  # ends at its thread's border
_logged: set[tuple[str, str]] = set()


class BackendError(RuntimeError):
    """The backend that was asked for cannot run this call; the message says why."""


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Within the block, and in this thread only: ``auto`` (Triton where it can run), ``triton`` or ``torch``."""
    token = _backend.set(_checked(name))
    try:
        yield
    finally:
        _backend.reset(token)


def current_backend() -> str:
    """The backend in force in this thread."""
    return _backend.get()


def use_triton(op: str, device: torch.device, problem: str | None) -> bool:
    """Whether ``op`` runs its kernel on ``device``; ``problem``: what its dtypes or layout have against that.

    Raises BackendError when the backend is ``triton`` and the kernel cannot run.
    """
    name = current_backend()
    if name == "torch":
        _log_once(logging.INFO, op, "torch: this backend is set")
        return False
    problem = triton_problem(device) or problem
    if name == "triton":
        if problem is not None:
            raise BackendError(f"{op}: backend 'triton' is set, but {problem}; use 'auto' or 'torch'")
        _log_once(logging.INFO, op, "triton: this backend is set")
        return True
    if problem is None and INTERPRETED:
        problem = "Triton's interpreter is on, which is for tests"
    if problem is not None:
        level = logging.WARNING if device.type == "cuda" else logging.INFO
        _log_once(level, op, f"torch, as {problem}")
        return False
    _log_once(logging.INFO, op, "triton")
    return True


def log_reference(op: str, reason: str) -> None:
    """Notes that ``op`` runs its reference as it has no kernel for this size or GPU, whatever the backend."""
    _log_once(logging.INFO, op, f"torch, as {reason}")


def triton_problem(device: torch.device) -> str | None:
    """What keeps every Triton kernel from ``device``, or None."""
    if MISSING is not None:
        return MISSING
    if INTERPRETED and device.type in ("cpu", "cuda"):
        return None
    if device.type == "cpu":
        return "the tensors are on cpu, which takes Triton's interpreter (TRITON_INTERPRET=1 before its first import)"
    if device.type != "cuda":
        return f"the tensors are on {device.type}, and the kernels are for cuda"
    capability = compute_capability(device)
    if capability < (8, 0):
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, and bfloat16 takes 8.0"
    return None


def tensor_core_problem(device: torch.device) -> str | None:
    """What keeps kernels that multiply large tiles through tensor descriptors from ``device``, or None.

    They hold up to 192 KiB in shared memory: data center GPUs from Hopper on can do that, and Hopper is what they were
    tried on.
    """
    if problem := triton_problem(device):
        return problem
    if not INTERPRETED and (torch.version.cuda is None or compute_capability(device) != (9, 0)):
        return "the GPU is not of the Hopper generation"
    return None if TensorDescriptor is not None else "this triton has no tensor descriptors, which takes 3.4"


def rows_of(dtype: torch.dtype, **tensors: Tensor) -> str | None:
    """What keeps ``tensors`` from a row kernel, or None: each must have ``dtype`` and be dense in its last dimension,
    all on one device and without gradients to record. The stride between rows is free."""
    device = next(iter(tensors.values())).device
    for name, tensor in tensors.items():
        if problem := _tensor_problem(name, tensor, dtype, device):
            return problem
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            return f"{name} is strided in its last dimension"
        if tensor.ndim > 1 and tensor.stride(0) == 0 and tensor.shape[0] > 1:
            return f"{name} has all its rows in one place, which a kernel may write to"
    return None


def bf16_rows(**tensors: Tensor) -> str | None:
    """As ``rows_of``, for bfloat16."""
    return rows_of(torch.bfloat16, **tensors)


def float32_signal(x: Tensor, **tensors: Tensor) -> str | None:
    """What keeps a signal ``x`` (B, C, n) and what is computed with it from a kernel of the vocoder, or None: float32,
    on one device, without gradients to record, and an item of ``x`` countable in 32 bits."""
    for name, tensor in {"x": x, **tensors}.items():
        if problem := _tensor_problem(name, tensor, torch.float32, x.device):
            return problem
    if x[0].numel() >= 2**31:
        return "x has 2**31 values in one item, and the kernels count them in 32 bits"
    return None


def row_index(index: Tensor, device: torch.device) -> str | None:
    """What keeps ``index`` (S,) from selecting table rows in a kernel, or None: dense int32 or int64 on ``device``."""
    if index.dtype not in (torch.int32, torch.int64):
        return f"index is {str(index.dtype).removeprefix('torch.')}, not int32 or int64"
    if index.stride(0) != 1 and index.shape[0] > 1:
        return "index is strided"
    if index.device != device:
        return f"index is on {index.device}, not on {device}"
    return None


def _tensor_problem(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> str | None:
    if tensor.dtype != dtype:
        return f"{name} is {str(tensor.dtype).removeprefix('torch.')}, not {str(dtype).removeprefix('torch.')}"
    if tensor.device != device:
        return f"{name} is on {tensor.device}, not on {device}"
    if tensor.requires_grad and torch.is_grad_enabled():
        return f"{name} requires a gradient, and the kernels have no backward"
    return None


def _checked(name: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"kernel backend {name!r} does not exist; use one of {', '.join(BACKENDS)}")
    return name


def _log_once(level: int, op: str, choice: str) -> None:
    if (op, choice) not in _logged:
        _logged.add((op, choice))
        log.log(level, "%s runs on %s", op, choice)
