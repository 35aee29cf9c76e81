"""The diffusion transformer of H3: one packed sequence of text, condition, audio and video rows, full attention."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from comfyui_h3.h3core.models.dit.adaln import Modulation
from comfyui_h3.h3core.models.dit.attention import AttentionFn, sdpa
from comfyui_h3.h3core.models.dit.block import Block, FinalLayer
from comfyui_h3.h3core.models.dit.config import NUM_MODALITIES, DiTConfig
from comfyui_h3.h3core.models.dit.refiner import TokenRefiner
from comfyui_h3.h3core.models.dit.rope import RotaryFrequencies


class DiT(nn.Module):
    """Predicts the velocity of audio and video rows toward the data.

    Parameters carry the official names. Those under ``FLOAT32`` are float32 whatever the dtype of the rest. What a
    timestep does to a block comes from the ``Modulator``, whose weights are not here. The linears that match ``FP8``
    can be in 8 bits.
    """

    FLOAT32 = (
        "video_patch_proj.",
        "audio_patch_proj.",
        "rope.",
        "final_layer.video_out.",
        "final_layer.audio_out.",
    )
    FP8 = re.compile(r"condition_proj|(token_refiner\.)?blocks\.\d+\.(attn\.(qkv|out)_proj|mlp\.fc[12])")

    def __init__(self, config: DiTConfig, attend: AttentionFn = sdpa):
        super().__init__()
        self.config = config
        self.video_patch_proj = nn.Linear(config.patch_size, config.hidden_size)
        self.audio_patch_proj = nn.Linear(config.audio_latents_dim, config.hidden_size)
        self.condition_proj = nn.Linear(config.text_dim, config.hidden_size)
        self.rope = RotaryFrequencies(config.rope_inv_freq_len)
        self.token_refiner = TokenRefiner(config, attend)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.num_layers))
        self.final_layer = FinalLayer(config)

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the residual stream."""
        return self.token_refiner.final_norm.weight.dtype

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
        modulation: Modulation,
        timestep_index: Tensor,
        modality: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Velocities of the target rows, float32: audio (num_audio, 32), video (num_video, 96).

        prefix: (num_prefix, D), rows that are not denoised: refined text, then conditions. audio, video: noisy rows,
        float32. timestep_index: (S,) int32, which of the modulation's timesteps each row has; modality: (S,) int32.
        cos, sin: (S, R / 2) in ``dtype``, from ``rope``.
        """
        num_targets = len(audio) + len(video)
        first, num_rows = len(prefix), len(prefix) + num_targets
        x = prefix.new_empty(num_rows, prefix.shape[1])  # the stream (S, D), written where it stays
        x[:first] = prefix
        x[first : first + len(audio)] = self.audio_patch_proj(audio)
        x[first + len(audio) :] = self.video_patch_proj(video)
        index = NUM_MODALITIES * timestep_index + modality
        tables = [modulation.of_block(layer) for layer in range(len(self.blocks))]
        norms = [block.entry(table) for block, table in zip(self.blocks, tables, strict=True)]  # type: ignore[operator]
        h = norms[0].of(x, index, self.config.norm_eps)
        for block, table, following in zip(self.blocks, tables, [*norms[1:], None], strict=True):
            x, h = block(x, h, table, following, index, cos, sin)
        return self.final_layer(x[-num_targets:], modulation.final, timestep_index[-num_targets:], len(audio))
