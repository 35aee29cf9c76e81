"""Which timesteps a request visits, and which of them each row has in each step."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from comfyui_h3.h3core.sampling.packing import PackedSequence
from comfyui_h3.h3core.sampling.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steps:
    """All steps of one request: ``sequence`` denoised along ``schedule``.

    groups: its timesteps, (M,) float32 each, R together; those of a group are projected together.
    places: per step (M,) int64, where its timesteps, ascending, are among the R.
    rows: per step (S,) int64, which of the step's timesteps each row has; one tensor serves all steps with equal rows.
    """

    sequence: PackedSequence
    schedule: Schedule
    groups: tuple[Tensor, ...]
    places: tuple[Tensor, ...]
    rows: tuple[Tensor, ...]

    @classmethod
    def of(cls, sequence: PackedSequence, schedule: Schedule, *, exact: bool) -> Steps:
        """exact: every step's timesteps are a group of their own, as the reference projects them; else all are one."""
        timesteps: list[Tensor] = []
        rows: list[Tensor] = []
        for step in range(schedule.num_forwards):
            visited, index = sequence.timestep_rows(1 - schedule.video[step], 1 - schedule.audio[step])
            timesteps.append(visited)
            index = index.long()
            # They change only where timesteps coincide, as at the start: a long clip has 109,000.
            rows.append(rows[-1] if rows and torch.equal(rows[-1], index) else index)
        if exact:
            groups = {tuple(visited.tolist()): visited for visited in timesteps}
            group_of_step = [tuple(visited.tolist()) for visited in timesteps]
        else:
            groups = {(): torch.unique(torch.cat(timesteps))}
            group_of_step = [()] * len(timesteps)
        starts = dict(zip(groups, itertools.accumulate(map(len, groups.values()), initial=0), strict=False))
        places = [
            starts[group] + torch.searchsorted(groups[group], visited)
            for group, visited in zip(group_of_step, timesteps, strict=True)
        ]
        return cls(
            sequence=sequence, schedule=schedule, groups=tuple(groups.values()), places=tuple(places), rows=tuple(rows)
        )

    @property
    def num_timesteps(self) -> int:
        """R, the rows of the modulation tables."""
        return sum(len(group) for group in self.groups)
