"""Which tensor of a file is which parameter, and how its rows are turned on the way, as tables.

Modules carry the official key names, so an official file needs a rule only for keys that are not read, and where rows
are stored in another order.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

RowOrder = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyMap:
    """How one layout of one component reads.

    skip: keys that are never read; all others are names of parameters.
    rows: pattern of a key -> how its rows are reordered, first match wins.
    """

    skip: re.Pattern[str] | None = None
    rows: tuple[tuple[re.Pattern[str], RowOrder], ...] = ()

    def is_read(self, key: str) -> bool:
        return not (self.skip and self.skip.fullmatch(key))

    def order(self, key: str) -> RowOrder | None:
        """Row order of a parameter; None when the file's is the module's."""
        return next((order for pattern, order in self.rows if pattern.fullmatch(key)), None)


def stack_qkv(num_heads: int, head_dim: int) -> RowOrder:
    """Interleaved rows (heads, 3, head_dim) -> stacked rows [all q | all k | all v]."""

    def order(weight: Tensor) -> Tensor:
        return weight.unflatten(0, (num_heads, 3, head_dim)).transpose(0, 1).flatten(0, 2)

    return order


def official_dit(num_heads: int, head_dim: int) -> KeyMap:
    """The sharded release, without its modulator: fused qkv rows are interleaved per head, in blocks and refiner."""
    return KeyMap(
        skip=re.compile(MODULATOR),
        rows=((re.compile(r".*\.attn\.qkv_proj\.weight"), stack_qkv(num_heads, head_dim)),),
    )


MODULATOR = r"time_embedder\..*|.*\.adaln_proj\..*"  # keys of the transformer's ``Modulator``


def official_modulator() -> KeyMap:
    """What of the transformer's shards sees timesteps only."""
    return KeyMap(skip=re.compile(rf"(?!{MODULATOR}).*"))


def official_text_encoder(tap: int, num_file_layers: int) -> KeyMap:
    """The release's Qwen3-VL: layers from the tap on, the final norm and the language head are never read."""
    dropped = "|".join(str(layer) for layer in range(tap, num_file_layers)) or "none"
    return KeyMap(
        skip=re.compile(rf"lm_head\.weight|model\.language_model\.(norm\.weight|layers\.({dropped})\..*)"),
    )


def half(prefixes: tuple[str, ...]) -> KeyMap:
    """One half (encoder or decoder) of a VAE file: keys outside ``prefixes`` are the other half's."""
    kept = "|".join(re.escape(prefix) for prefix in prefixes)
    return KeyMap(skip=re.compile(rf"(?!{kept}).*"))
