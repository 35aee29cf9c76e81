"""Whether fused qkv rows are interleaved per head or stacked: nothing in a file says so, its numbers do.

Training leaves q, k and v of different size. Where the rows are interleaved, every third block of ``head_dim`` rows is
a q; where they are stacked, the first third of the blocks is. Key and shape are the same, and a wrong reading is noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from comfyui_h3.h3core.checkpoint.index import TensorEntry
from comfyui_h3.h3core.errors import CheckpointError

ROWS_PER_BLOCK = 16  # of head_dim; evenly spaced, so that slow and fast rotary channels count alike
# Of the variance of log RMS. Chance explains 2 / (3 * heads - 1) of it, 0.012 with 56 heads; the one that is claimed
# has to explain far more than chance, and than the other.
MIN_EXPLAINED = 0.1
MIN_RATIO = 4.0
MIN_VARIANCE = 1e-9  # of log RMS; blocks that are more alike than this differ by rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class QkvOrder:
    """order: None where the numbers do not say. by_period, by_thirds: what each explains of the variance, 0 to 1."""

    order: Literal["interleaved", "stacked"] | None
    by_period: float
    by_thirds: float

    @property
    def evidence(self) -> str:
        return f"of the differences between heads, period 3 explains {self.by_period:.0%}, thirds {self.by_thirds:.0%}"


def judge(rms: Tensor) -> QkvOrder:
    """rms: (L, 3 * heads), of each block of head_dim rows in L layers."""
    num_heads = rms.shape[1] // 3
    blocks = torch.arange(3 * num_heads)
    logs = rms.double().clamp_min(1e-30).log()
    by_period, by_thirds = _explained(logs, blocks % 3), _explained(logs, blocks // num_heads)
    order: Literal["interleaved", "stacked"] | None = None
    if by_period >= MIN_EXPLAINED and by_period >= MIN_RATIO * by_thirds:
        order = "interleaved"
    elif by_thirds >= MIN_EXPLAINED and by_thirds >= MIN_RATIO * by_period:
        order = "stacked"
    return QkvOrder(order=order, by_period=by_period, by_thirds=by_thirds)


def block_rms(key: str, entry: TensorEntry, num_heads: int, head_dim: int) -> Tensor:
    """(3 * heads,): RMS of a sample of rows of each block. Raises CheckpointError for another shape."""
    if len(entry.shape) != 2 or entry.shape[0] != 3 * num_heads * head_dim:
        raise CheckpointError(
            f"{entry.file}: {key} has the shape {list(entry.shape)}, the config wants {3 * num_heads * head_dim} rows"
        )
    step = max(1, head_dim // ROWS_PER_BLOCK)
    try:
        with safe_open(entry.file, framework="pt", device="cpu") as tensors:
            weight = tensors.get_slice(key)
            rows = [weight[row : row + 1].float().square().mean() for row in range(0, entry.shape[0], step)]
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{entry.file} cannot be read ({error}); download it again") from error
    return torch.stack(rows).unflatten(0, (3 * num_heads, -1)).mean(1).sqrt()


def _explained(logs: Tensor, group: Tensor) -> float:
    """Share of the variance within layers that lies between three groups of blocks, mean over layers."""
    centred = logs - logs.mean(1, keepdim=True)
    total = centred.square().sum(1)
    means = torch.stack([centred[:, group == i].mean(1) for i in range(3)], 1)  # (L, 3)
    between = means.square().sum(1) * (logs.shape[1] / 3)
    differ = total > MIN_VARIANCE * logs.shape[1]
    return float(torch.where(differ, between / total.clamp_min(1e-300), 0.0).mean())
