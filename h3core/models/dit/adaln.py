"""Adaptive modulation: from a timestep to the shifts, scales and gates of every block."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from comfyui_h3.h3core.models.dit.config import NUM_CHUNKS, NUM_MODALITIES, DiTConfig
from comfyui_h3.h3core.models.dit.rope import timestep_sinusoid


class TimestepEmbedder(nn.Module):
    """Timesteps (M,) float32 in [0, 1], 1 = clean -> (M, time_embed_dim) float32. Its weights stay float32."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.input_dim = config.timestep_input_dim
        self.proj_in = nn.Linear(config.timestep_input_dim, config.time_embed_hidden_size)
        self.proj_out = nn.Linear(config.time_embed_hidden_size, config.time_embed_dim)

    def forward(self, timesteps: Tensor) -> Tensor:
        return self.proj_out(F.silu(self.proj_in(timestep_sinusoid(timesteps, self.input_dim))))


class AdaLN(nn.Module):
    """temb (M, E), the SiLU already applied -> six tables (3 M, D): shift, scale, gate of attention, then of the MLP.

    Row ``3 * timestep + modality`` serves the rows of that timestep and modality. The tables are views of one tensor.
    """

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.hidden_size = config.hidden_size
        self.linear = nn.Linear(config.time_embed_dim, NUM_MODALITIES * NUM_CHUNKS * config.hidden_size)

    def forward(self, temb: Tensor) -> tuple[Tensor, ...]:
        return self.linear(temb).view(-1, NUM_CHUNKS, self.hidden_size).unbind(1)


class FinalAdaLN(nn.Module):
    """temb (M, E) -> shift, scale (M, D) of the final layer, the same for all modalities."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.linear = nn.Linear(config.time_embed_dim, 2 * config.hidden_size)

    def forward(self, temb: Tensor) -> tuple[Tensor, Tensor]:
        shift, scale = self.linear(temb).chunk(2, dim=-1)
        return shift, scale
