"""One DiT block, and the final layer."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from comfyui_h3.h3core.models.dit.adaln import BlockModulation
from comfyui_h3.h3core.models.dit.attention import MLP, Attention, AttentionFn
from comfyui_h3.h3core.models.dit.config import DiTConfig
from comfyui_h3.h3core.models.dit.inputs import ops_before
from comfyui_h3.kernels.gate_residual import gate_residual
from comfyui_h3.kernels.norm_modulate import norm_modulate
from comfyui_h3.kernels.quantize_fp8 import QuantizedRows

Rows = Tensor | QuantizedRows
"""(S, D), in the form that the linear behind them reads."""


class ModulatedNorm(NamedTuple):
    """A norm and its modulation: weight (D,), tables scale and shift (M, D); its rows are for ``reader``."""

    weight: Tensor
    scale: Tensor
    shift: Tensor
    reader: nn.Module

    def of(self, x: Tensor, index: Tensor, eps: float) -> Rows:
        """Rows of the stream x (S, D)."""
        return ops_before(self.reader).norm_modulate(x, self.weight, self.scale, self.shift, index, eps)

    def after(self, x: Tensor, o: Tensor, gate: Tensor, index: Tensor, eps: float) -> tuple[Tensor, Rows]:
        """The stream with a branch o (S, D) added through its gate, and its rows. x and o are given away."""
        ops = ops_before(self.reader)
        return ops.gate_residual_norm(x, o, gate, self.weight, self.scale, self.shift, index, eps)


class Block(nn.Module):
    """AdaLN-modulated attention, then AdaLN-modulated SwiGLU.

    Every residual is added in one pass with the norm that follows it. So a block gets its input normed already, and
    norms its output for the next.
    """

    def __init__(self, config: DiTConfig, attend: AttentionFn):
        super().__init__()
        self.eps = config.norm_eps
        self.norm1 = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = Attention(config, attend)
        self.norm2 = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MLP(config)

    def entry(self, table: BlockModulation) -> ModulatedNorm:
        """The norm of the block's input."""
        return ModulatedNorm(self.norm1.weight, table.scale1, table.shift1, self.attn.qkv_proj)

    def forward(
        self,
        x: Tensor,
        h: Rows,
        table: BlockModulation,
        following: ModulatedNorm | None,
        index: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Rows]:
        """The stream after the block, and its rows under the ``following`` norm; under none they mean nothing.

        x: stream (S, D); h: its rows under ``entry``. index: (S,), row of the tables. cos, sin: (S, R / 2).
        """
        o = self.attn(h, cos, sin)
        between = ModulatedNorm(self.norm2.weight, table.scale2, table.shift2, self.mlp.fc1)
        x, h = between.after(x, o, table.gate1, index, self.eps)
        o = self.mlp(h)
        if following is None:
            return gate_residual(x, o, table.gate2, index), o
        return following.after(x, o, table.gate2, index, self.eps)


class FinalLayer(nn.Module):
    """Modulated norm, then one float32 head per stream: velocities of the audio and of the video rows."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.eps = config.final_norm_eps
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.final_norm_eps)
        self.video_out = nn.Linear(config.hidden_size, config.patch_size)
        self.audio_out = nn.Linear(config.hidden_size, config.audio_latents_dim)

    def forward(self, x: Tensor, table: Tensor, timestep_index: Tensor, num_audio: int) -> tuple[Tensor, Tensor]:
        # x (num_audio + num_video, D): target rows only, audio first; table (R, 2, D): shift and scale
        shift, scale = table.unbind(1)
        x = norm_modulate(x, self.norm.weight, scale, shift, timestep_index, self.eps).float()
        return self.audio_out(x[:num_audio]), self.video_out(x[num_audio:])
