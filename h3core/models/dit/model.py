"""The diffusion transformer of H3: one packed sequence of text, condition, audio and video rows, full attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfyui_h3.h3core.models.dit.adaln import TimestepEmbedder
from comfyui_h3.h3core.models.dit.attention import AttentionFn, sdpa
from comfyui_h3.h3core.models.dit.block import Block, FinalLayer
from comfyui_h3.h3core.models.dit.config import NUM_MODALITIES, DiTConfig
from comfyui_h3.h3core.models.dit.refiner import TokenRefiner
from comfyui_h3.h3core.models.dit.rope import RotaryFrequencies


class DiT(nn.Module):
    """Predicts the velocity of audio and video rows toward the data.

    Parameters carry the official names. Those under ``FLOAT32`` are float32 whatever the dtype of the rest.
    """

    FLOAT32 = (
        "video_patch_proj.",
        "audio_patch_proj.",
        "time_embedder.",
        "rope.",
        "final_layer.video_out.",
        "final_layer.audio_out.",
    )

    def __init__(self, config: DiTConfig, attend: AttentionFn = sdpa):
        super().__init__()
        self.config = config
        self.video_patch_proj = nn.Linear(config.patch_size, config.hidden_size)
        self.audio_patch_proj = nn.Linear(config.audio_latents_dim, config.hidden_size)
        self.condition_proj = nn.Linear(config.text_dim, config.hidden_size)
        self.time_embedder = TimestepEmbedder(config)
        self.rope = RotaryFrequencies(config.rope_inv_freq_len)
        self.token_refiner = TokenRefiner(config, attend)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.num_layers))
        self.final_layer = FinalLayer(config)

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the residual stream."""
        return self.condition_proj.weight.dtype

    def embed_text(self, text: Tensor) -> Tensor:
        """Text states (L, text_dim) -> refined rows (L, D). Depends on the prompt alone: once per request."""
        return self.token_refiner(self.condition_proj(text.to(self.dtype)))

    def embed_audio(self, rows: Tensor) -> Tensor:
        """Audio rows (n, 32) float32 -> (n, D) in ``dtype``."""
        return self.audio_patch_proj(rows).to(self.dtype)

    def embed_video(self, rows: Tensor) -> Tensor:
        """Video rows (n, 96) float32 -> (n, D) in ``dtype``."""
        return self.video_patch_proj(rows).to(self.dtype)

    def forward(
        self,
        prefix: Tensor,
        audio: Tensor,
        video: Tensor,
        timesteps: Tensor,
        timestep_index: Tensor,
        modality: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Velocities of the target rows, float32: audio (num_audio, 32), video (num_video, 96).

        prefix: (num_prefix, D), rows that are not denoised: refined text, then conditions. audio, video: noisy rows,
        float32. timesteps: (M,) float32, the distinct ones.
        timestep_index, modality: (S,) int32. cos, sin: (S, R / 2) in ``dtype``, from ``rope``.
        """
        num_targets = len(audio) + len(video)
        x = torch.cat([prefix, self.embed_audio(audio), self.embed_video(video)])  # (S, D)
        temb = F.silu(self.time_embedder(timesteps)).to(self.dtype)  # shared by all blocks
        index = NUM_MODALITIES * timestep_index + modality
        for block in self.blocks:
            x = block(x, temb, index, cos, sin)
        return self.final_layer(x[-num_targets:], temb, timestep_index[-num_targets:], len(audio))
