"""Which attention the DiT runs on a device: chosen once, by what it is, what is installed, and a trial of that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from comfyui_h3.h3core.accel.fp8_attention import Fp8Attention, unbatched
from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.models.dit.attention import AttentionFn, sdpa

log = logging.getLogger(__name__)

# The order in which "auto" asks, by the first figure of the compute capability. All but the last may be missing; on a
# GPU that is not listed PyTorch decides for itself, kernel by kernel, and always has one that runs.
PREFERRED: Mapping[int, tuple[str, ...]] = {
    8: ("fa2", "flash", "sdpa"),
    9: ("fa3", "cudnn", "flash", "sdpa"),
    10: ("fa4", "cudnn", "flash", "sdpa"),
}
ATTENTIONS = ("auto", "fa3", "fa4", "fa2", "cudnn", "flash", "sdpa", "fa3_fp8")

TRIAL_ROWS = 320  # more than one tile of every kernel, and no multiple of one
TRIAL_ERROR = 2.0**-5  # of the largest value: a kernel that is wrong is wrong by far more, bf16 alone by 2**-7
TRIAL_ERROR_FP8 = 2.0**-2


class Unavailable(Exception):
    """Why an attention cannot run here."""


class Missing(Unavailable):
    """It is not installed, or not for this GPU or precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """name: one of ``ATTENTIONS`` but "auto". reason: why it, and why none that is preferred to it."""

    name: str
    reason: str
    attend: AttentionFn


def choose_attention(requested: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Attention:
    """The attention for heads of ``head_dim`` channels in ``dtype`` on ``device``; logged.

    "auto" takes the first that runs of those ``PREFERRED`` for the device, all of the same precision; "fa3_fp8" is less
    precise and has to be asked for. Packages are tried on a few rows first, as one that is built for another GPU or
    PyTorch imports well and fails later.
    Raises RequestError when the one asked for cannot run, saying why.
    """
    if requested != "auto":
        try:
            chosen = Attention(name=requested, reason="it is set", attend=_ready(requested, device, dtype, head_dim))
        except Unavailable as problem:
            raise RequestError(f"attention={requested} cannot run: {problem}; use attention=auto") from problem
    else:
        chosen = _first_that_runs(device, dtype, head_dim)
    log.info("attention: %s, as %s", chosen.name, chosen.reason)
    return chosen


def _first_that_runs(device: torch.device, dtype: torch.dtype, head_dim: int) -> Attention:
    if device.type != "cuda":
        return Attention(name="sdpa", reason=f"the device is {device.type}", attend=sdpa)
    capability = torch.cuda.get_device_capability(device)
    reasons = [f"the GPU has compute capability {capability[0]}.{capability[1]}"]
    for name in PREFERRED.get(capability[0], ()):
        try:
            attend = _ready(name, device, dtype, head_dim)
        except Unavailable as problem:
            reasons.append(f"{name} cannot run: {problem}")
            if not isinstance(problem, Missing):  # it was there, and a slower one runs in its place
                log.warning("attention: %s cannot run: %s", name, problem)
        else:
            return Attention(name=name, reason="; ".join(reasons), attend=attend)
    return Attention(name="sdpa", reason="; ".join(reasons), attend=sdpa)


def _ready(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionFn:
    """The attention ``name``, tried. Raises Unavailable."""
    if name == "sdpa":
        return sdpa
    if device.type != "cuda":
        raise Missing(f"the device is {device.type}")
    if dtype not in (torch.bfloat16, torch.float16):
        raise Missing(f"the precision is {str(dtype).removeprefix('torch.')}, and it has bfloat16 only")
    attend = _LOADERS[name](device)
    _try(attend, device, dtype, head_dim, TRIAL_ERROR_FP8 if name == "fa3_fp8" else TRIAL_ERROR)
    return attend


def _try(attend: AttentionFn, device: torch.device, dtype: torch.dtype, head_dim: int, limit: float) -> None:
    """Raises Unavailable when ``attend`` fails on a few rows, or is far from plain arithmetic."""
    generator = torch.Generator(device).manual_seed(0)
    # Views of one projection, as the DiT has them; unit rows, as its norms make them.
    qkv = torch.randn(TRIAL_ROWS, 3, 2, head_dim, device=device, generator=generator)
    q, k, v = F.rms_norm(qkv, (head_dim,)).to(dtype).unbind(1)
    expected = sdpa(q.float(), k.float(), v.float())
    try:
        out = _heads_of(attend, q, k, v).float()
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:  # says nothing about the attention
        raise
    except Exception as error:  # whatever a package raises that was not built for this machine
        raise Unavailable(f"it fails on this machine ({type(error).__name__}: {error})") from error
    if out.shape != expected.shape:
        raise Unavailable(f"its result is {tuple(out.shape)}, not {tuple(expected.shape)}")
    apart = ((out - expected).abs().max() / expected.abs().max()).item()
    if not apart <= limit:
        raise Unavailable(f"its results are wrong on this machine, {apart:.1e} of the largest value off")


def _heads_of(attend: AttentionFn, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over heads without rotation; one in 8 bits makes its own of them."""
    if isinstance(attend, Fp8Attention):
        weight, none = q.new_ones(q.shape[-1]), q.new_empty(len(q), 0)
        return attend(*attend.norm_rope(q.clone(), k.clone(), weight, weight, none, none, 1e-5), v)
    return attend(q, k, v)


def _need(device: torch.device, name: str, majors: tuple[int, ...]) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability[0] not in majors:
        wanted = ", ".join(f"{major}.x" for major in majors)
        raise Missing(f"the GPU has compute capability {capability[0]}.{capability[1]}, and {name} is for {wanted}")


def _imported(package: str, module: str) -> Any:
    try:
        return __import__(module, fromlist=["flash_attn_func"]).flash_attn_func
    except Exception as error:  # not installed, or built for another CUDA or PyTorch: they raise whatever they like
        raise Missing(f"the package {package} cannot be imported ({error})") from error


def _package(package: str, module: str, name: str, majors: tuple[int, ...]) -> Callable[[torch.device], AttentionFn]:
    """Loads ``flash_attn_func`` over (1, S, N, H) from a package of the FlashAttention family."""

    def load(device: torch.device) -> AttentionFn:
        _need(device, name, majors)
        flash = _imported(package, module)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return unbatched(flash(q[None], k[None], v[None]))

        return attend

    return load


def _fa3_fp8(device: torch.device) -> AttentionFn:
    _need(device, "FlashAttention 3", (9,))
    return Fp8Attention(flash=_imported("fa3-fwd", "fa3_fwd_interface"))


def _of_pytorch(call: Callable[[Tensor, Tensor, Tensor], Any]) -> Callable[[torch.device], AttentionFn]:
    """One of PyTorch's own kernels, by its operation: choosing it through ``sdpa_kernel`` would set flags of the whole
    process, for other threads as well."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # (1, N, S, H)
        return call(q, k, v)[0][0].transpose(0, 1)

    return lambda device: attend


def _cudnn(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, False)


def _flash(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)


_LOADERS: Mapping[str, Callable[[torch.device], AttentionFn]] = {
    "fa2": _package("flash-attn", "flash_attn", "FlashAttention 2", (8, 9, 10, 12)),
    "fa3": _package("fa3-fwd", "fa3_fwd_interface", "FlashAttention 3", (9,)),
    "fa4": _package("flash-attn-4", "flash_attn.cute", "FlashAttention 4", (9, 10)),
    "fa3_fp8": _fa3_fp8,
    "cudnn": _of_pytorch(_cudnn),
    "flash": _of_pytorch(_flash),
}
