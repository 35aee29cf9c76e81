"""Attention of the DiT and of its token refiner: fused projection, per-head norms, rotation, full attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from comfyui_h3.h3core.models.dit.config import DiTConfig
from comfyui_h3.h3core.models.dit.inputs import ops_before
from comfyui_h3.kernels.qk_norm_rope import qk_norm_rope
from comfyui_h3.kernels.quantize_fp8 import QuantizedRows

AttentionFn = Callable[[Any, Any, Tensor], Tensor]
"""q, k, v (S, N, H) -> (S, N, H): every row attends to every row. One that reads q and k in a form of its own has a
``norm_rope`` that gives it, in the place of ``qk_norm_rope``."""


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's scaled dot product attention over one document. (S, N, H) each -> (S, N, H)."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # (1, N, S, H)
    return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1)


class Attention(nn.Module):
    """``out_proj(attend(...))`` with q and k normalised per head; ``qkv_proj`` rows are [all q | all k | all v]."""

    def __init__(self, config: DiTConfig, attend: AttentionFn):
        super().__init__()
        self.attend = attend
        self.norm_rope = getattr(attend, "norm_rope", qk_norm_rope)
        self.heads = (3, config.num_attention_heads, config.attention_head_dim)
        self.eps = config.qk_norm_eps
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * config.inner_size, bias=False)
        self.q_norm = nn.RMSNorm(config.attention_head_dim, eps=config.qk_norm_eps)
        self.k_norm = nn.RMSNorm(config.attention_head_dim, eps=config.qk_norm_eps)
        self.out_proj = nn.Linear(config.inner_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor | QuantizedRows, cos: Tensor, sin: Tensor) -> Tensor:
        # x (S, D); cos, sin (S, R / 2): the first R channels of each head turn
        q, k, v = self.qkv_proj(x).unflatten(-1, self.heads).unbind(1)  # (S, N, H) each
        q, k = self.norm_rope(q, k, self.q_norm.weight, self.k_norm.weight, cos, sin, self.eps)
        return self.out_proj(self.attend(q, k, v).flatten(1))


class RefinerAttention(Attention):
    """The refiner's attention: the same without rotation, over the text rows alone."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.qkv_proj(x).unflatten(-1, self.heads).unbind(1)
        none = x.new_empty(len(x), 0)  # no channel turns
        q, k = qk_norm_rope(q, k, self.q_norm.weight, self.k_norm.weight, none, none, self.eps)
        return self.out_proj(self.attend(q, k, v).flatten(1))


class MLP(nn.Module):
    """SwiGLU: ``fc2(silu(gate) * up)``; ``fc1`` rows are [gate | up]."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, 2 * config.ffn_hidden_size, bias=False)
        self.fc2 = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor | QuantizedRows) -> Tensor:
        return self.fc2(ops_before(self.fc2).swiglu(self.fc1(x)))
