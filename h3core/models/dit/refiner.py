"""Token refiner: two plain transformer blocks over the text rows. It does not depend on the timestep: run it once."""

from __future__ import annotations

from torch import Tensor, nn

from comfyui_h3.h3core.models.dit.attention import MLP, AttentionFn, RefinerAttention
from comfyui_h3.h3core.models.dit.config import DiTConfig


class RefinerBlock(nn.Module):
    """Pre-norm attention and SwiGLU, without rotation or modulation."""

    def __init__(self, config: DiTConfig, attend: AttentionFn):
        super().__init__()
        self.norm1 = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = RefinerAttention(config, attend)
        self.norm2 = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TokenRefiner(nn.Module):
    """(L, D) -> (L, D)."""

    def __init__(self, config: DiTConfig, attend: AttentionFn):
        super().__init__()
        self.blocks = nn.ModuleList(RefinerBlock(config, attend) for _ in range(config.token_refiner_num_layers))
        self.final_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.final_norm(x)
