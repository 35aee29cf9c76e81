"""Sigma grids of the two streams, and the timesteps each forward runs at."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def shifted_sigmas(num_points: int, shift: float) -> Tensor:
    """(num_points,) float32 on the CPU, from 1 down to 0: ``shift * b / (1 + (shift - 1) * b)`` over a uniform b.

    Equal neighbours would be a forward that changes nothing; they are collapsed, as in the public reference.
    """
    base = torch.linspace(1, 0, num_points, dtype=torch.float32)
    sigmas = shift * base / (1 + (shift - 1) * base)
    return torch.unique_consecutive(sigmas)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """Sigmas of video and audio, paired by index: (num_forwards + 1,) float32 on the CPU each.

    The two streams run on clocks of their own: at shifts 12 and 3 the audio is cleaner than the video in every step.
    """

    video: Tensor
    audio: Tensor

    @classmethod
    def uniform(cls, sigma_points: int, video_shift: float, audio_shift: float) -> Schedule:
        """``sigma_points`` points, hence ``sigma_points - 1`` forwards."""
        return cls(video=shifted_sigmas(sigma_points, video_shift), audio=shifted_sigmas(sigma_points, audio_shift))

    @property
    def num_forwards(self) -> int:
        return len(self.video) - 1


def euler_step(x: Tensor, velocity: Tensor, sigmas: Tensor, step: int) -> Tensor:
    """One deterministic step of a stream, float32. The velocity points to the data: ``x0 = x + (1 - t) * v``.

    ``1 - t`` and sigma differ in the last bit for small sigmas; the reference uses the first for x0 and the second for
    the blend, and so does this.
    """
    timestep = 1 - sigmas[step]
    x0 = x + (1 - timestep) * velocity
    ratio = sigmas[step + 1] / sigmas[step]
    return ratio * x + (1 - ratio) * x0
