"""One DiT block, and the final layer."""

from __future__ import annotations

from torch import Tensor, nn

from comfyui_h3.h3core.models.dit.adaln import AdaLN, FinalAdaLN
from comfyui_h3.h3core.models.dit.attention import MLP, Attention, AttentionFn
from comfyui_h3.h3core.models.dit.config import DiTConfig
from comfyui_h3.kernels.gate_residual import gate_residual
from comfyui_h3.kernels.norm_modulate import norm_modulate


class Block(nn.Module):
    """AdaLN-modulated attention, then AdaLN-modulated SwiGLU."""

    def __init__(self, config: DiTConfig, attend: AttentionFn):
        super().__init__()
        self.eps = config.norm_eps
        self.adaln_proj = AdaLN(config)
        self.norm1 = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = Attention(config, attend)
        self.norm2 = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, temb: Tensor, index: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # x (S, D); temb (num_timesteps, E); index (S,): row of the modulation tables; cos, sin (S, R / 2)
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaln_proj(temb)  # each (M, D), M = num_timesteps * 3
        h = norm_modulate(x, self.norm1.weight, scale1, shift1, index, self.eps)
        x = gate_residual(x, self.attn(h, cos, sin), gate1, index)
        h = norm_modulate(x, self.norm2.weight, scale2, shift2, index, self.eps)
        return gate_residual(x, self.mlp(h), gate2, index)


class FinalLayer(nn.Module):
    """Modulated norm, then one float32 head per stream: velocities of the audio and of the video rows."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.eps = config.final_norm_eps
        self.adaln_proj = FinalAdaLN(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.final_norm_eps)
        self.video_out = nn.Linear(config.hidden_size, config.patch_size)
        self.audio_out = nn.Linear(config.hidden_size, config.audio_latents_dim)

    def forward(self, x: Tensor, temb: Tensor, timestep_index: Tensor, num_audio: int) -> tuple[Tensor, Tensor]:
        # x (num_audio + num_video, D): target rows only, audio first
        shift, scale = self.adaln_proj(temb)  # (num_timesteps, D)
        x = norm_modulate(x, self.norm.weight, scale, shift, timestep_index, self.eps).float()
        return self.audio_out(x[:num_audio]), self.video_out(x[num_audio:])
