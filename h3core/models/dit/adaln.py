"""Adaptive modulation: from a timestep to the shifts, scales and gates of every block.

It depends on the timesteps alone, and its projections are two fifths of the weights: what a request needs of it is
computed once, as one ``Modulation``, and the projections need not stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfyui_h3.h3core.models.dit.config import NUM_CHUNKS, NUM_MODALITIES, DiTConfig
from comfyui_h3.h3core.models.dit.rope import timestep_sinusoid


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockModulation:
    """The six tables of one block, each (3 R, D), views of one tensor: of its attention, then of its MLP.

    Row ``3 * timestep + modality`` serves the rows of that timestep and modality.
    """

    shift1: Tensor
    scale1: Tensor
    gate1: Tensor
    shift2: Tensor
    scale2: Tensor
    gate2: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Modulation:
    """All tables for R timesteps. blocks: (num_layers, 3 R, 6, D). final: (R, 2, D), of the final layer."""

    blocks: Tensor
    final: Tensor

    @property
    def num_bytes(self) -> int:
        return self.blocks.nbytes + self.final.nbytes

    def of_block(self, layer: int) -> BlockModulation:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.blocks[layer].unbind(1)
        return BlockModulation(shift1=shift1, scale1=scale1, gate1=gate1, shift2=shift2, scale2=scale2, gate2=gate2)


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
    """One layer's projection of the timestep embedding (M, E) to its tables (M, num_tables * D)."""

    def __init__(self, config: DiTConfig, num_tables: int):
        super().__init__()
        self.linear = nn.Linear(config.time_embed_dim, num_tables * config.hidden_size)

    def forward(self, temb: Tensor) -> Tensor:
        return self.linear(temb)


class _Layer(nn.Module):
    """Gives the projection its official name."""

    def __init__(self, config: DiTConfig, num_tables: int):
        super().__init__()
        self.adaln_proj = AdaLN(config, num_tables)

    def forward(self, temb: Tensor) -> Tensor:
        return self.adaln_proj(temb)


Resident = Callable[[str], AbstractContextManager[object]]
"""Within ``resident(prefix)`` the weights under that prefix are there."""


def _all_resident(prefix: str) -> AbstractContextManager[object]:
    return nullcontext()


class Modulator(nn.Module):
    """The part of the transformer that sees timesteps only; 24.3 GiB at the released size, used layer by layer."""

    FLOAT32 = ("time_embedder.",)

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.config = config
        self.time_embedder = TimestepEmbedder(config)
        self.blocks = nn.ModuleList(_Layer(config, NUM_MODALITIES * NUM_CHUNKS) for _ in range(config.num_layers))
        self.final_layer = _Layer(config, 2)

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the tables."""
        return self.final_layer.adaln_proj.linear.weight.dtype

    def forward(self, groups: Sequence[Tensor], resident: Resident = _all_resident) -> Modulation:
        """The tables of R timesteps, float32 in ``groups`` of any sizes, one after the other.

        Each group is one matrix product in every layer: another grouping may give other last bits.
        """
        with resident("time_embedder."):
            # The SiLU in front of all projections is applied once, in float32.
            temb = [F.silu(self.time_embedder(timesteps)).to(self.dtype) for timesteps in groups]
        num_rows, hidden = sum(len(timesteps) for timesteps in groups), self.config.hidden_size
        shape = (len(self.blocks), NUM_MODALITIES * num_rows, NUM_CHUNKS, hidden)
        blocks = torch.empty(shape, dtype=self.dtype, device=groups[0].device)
        for layer, block in enumerate(self.blocks):
            with resident(f"blocks.{layer}."):
                blocks[layer] = torch.cat([block(rows) for rows in temb]).view(shape[1:])
        with resident("final_layer."):
            final = torch.cat([self.final_layer(rows) for rows in temb]).view(num_rows, 2, hidden)
        return Modulation(blocks=blocks, final=final)
