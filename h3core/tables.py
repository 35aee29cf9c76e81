"""The modulation tables of an engine: those of the last job serve the next one on the same schedule."""

from __future__ import annotations

import torch

from comfyui_h3.h3core.checkpoint.official import Checkpoint
from comfyui_h3.h3core.models.dit.adaln import Modulation
from comfyui_h3.h3core.result_cache import key_of
from comfyui_h3.h3core.sampling.steps import Steps
from comfyui_h3.h3core.types import Progress


class ModulationTables:
    """One set of tables on a device, 0.9 GiB for a usual job on the release."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self._device = device
        self._dtype = dtype
        self._key: str | None = None
        self._tables: Modulation | None = None

    @property
    def num_bytes(self) -> int:
        tables = self._tables  # another thread may clear it
        return 0 if tables is None else tables.num_bytes

    def num_missing(self, checkpoint: Checkpoint, steps: Steps) -> int:
        """Timesteps whose tables ``get`` would make: none, or all of the steps."""
        return 0 if self._key == _key(checkpoint, steps) else steps.num_timesteps

    def get(self, checkpoint: Checkpoint, steps: Steps, on_load: Progress) -> Modulation:
        """The tables of the steps. Raises CheckpointError as ``Checkpoint.read_modulation`` does."""
        if self._tables is None or self.num_missing(checkpoint, steps):
            self.clear()  # the old tables leave before there are new ones
            self._tables = checkpoint.read_modulation(steps.groups, self._device, self._dtype, on_load)
            self._key = _key(checkpoint, steps)
        return self._tables

    def clear(self) -> None:
        self._key = self._tables = None


def _key(checkpoint: Checkpoint, steps: Steps) -> str:
    # Of the partition, whatever else it shares with the other: fine-tunes may differ in these projections alone.
    # LoRAs change them, too.
    loras = checkpoint.modulator.through
    return key_of(checkpoint.partition, loras, [timesteps.tolist() for timesteps in steps.groups])
