"""Which attention the DiT runs on a device: chosen once, by what the device is and what is installed."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.models.dit.attention import AttentionFn, sdpa

log = logging.getLogger(__name__)

ATTENTIONS = ("auto", "fa3", "sdpa")
HOPPER = 9  # compute capability
FA3_HEAD_DIM = 128  # the width of the released heads, and the one tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """name: "fa3" is FlashAttention 3 (the package fa3-fwd), "sdpa" PyTorch's own. reason: why not another."""

    name: str
    reason: str
    attend: AttentionFn


def choose_attention(requested: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Attention:
    """The attention for heads of ``head_dim`` channels in ``dtype`` on ``device``; logged.

    "auto" takes FlashAttention 3 where it can run: on Hopper GPUs it is a fifth faster than PyTorch's own, at the same
    precision. Raises RequestError when "fa3" is asked for and cannot run, saying why.
    """
    if requested == "sdpa":
        chosen = Attention(name="sdpa", reason="it is set", attend=sdpa)
    elif problem := _fa3_problem(device, dtype, head_dim):
        if requested == "fa3":
            raise RequestError(f"attention=fa3 cannot run: {problem}; use attention=auto")
        chosen = Attention(name="sdpa", reason=problem, attend=sdpa)
    else:
        chosen = Attention(name="fa3", reason="the GPU is a Hopper and fa3-fwd is installed", attend=_fa3())
    log.info("attention: %s, as %s", chosen.name, chosen.reason)
    return chosen


def _fa3_problem(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """What keeps FlashAttention 3 from running, or None."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability[0] != HOPPER:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, and FlashAttention 3 is for 9.0"
    if dtype != torch.bfloat16:
        return f"the precision is {str(dtype).removeprefix('torch.')}, and fa3-fwd has bfloat16 only"
    if head_dim != FA3_HEAD_DIM:
        return f"heads have {head_dim} channels, and it was tried with {FA3_HEAD_DIM}"
    try:
        import fa3_fwd_interface  # noqa: F401
    except (ImportError, OSError) as error:  # not installed, or built for another CUDA or PyTorch
        return f"the package fa3-fwd cannot be imported ({error})"
    return None


def _fa3() -> AttentionFn:
    from fa3_fwd_interface import flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q[None], k[None], v[None])[0]

    return attend
