"""Random weights of the tiny H3: no tensor is zero, so no block is a no-op, and values stay in a sane range."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from comfyui_h3.h3core.models.audio_vae.filters import kaiser_sinc_filter

Fill = Callable[[Tensor], Tensor]
"""Standard normal noise of a tensor's shape -> its values, float32."""


def _matrix(gain: float = 1.0) -> Fill:
    return lambda noise: noise * (gain / noise[0].numel() ** 0.5)


def _around(centre: float, spread: float) -> Fill:
    return lambda noise: centre + spread * noise


def _grouped_value_rows(num_heads: int, head_dim: int, gain: float) -> Fill:
    """Fused qkv rows interleaved per head, the v rows ``gain`` times as large: in a file, this tells the row order."""

    def fill(noise: Tensor) -> Tensor:
        rows = _matrix()(noise).unflatten(0, (num_heads, 3, head_dim)).clone()
        rows[:, 2] *= gain
        return rows.flatten(0, 2)

    return fill


def _rope_inv_freq(noise: Tensor) -> Tensor:
    num = len(noise)
    return 1.0 / 10000.0 ** (torch.arange(0, 2 * num, 2, dtype=torch.float32) / (2 * num))


def transformer_rules(num_heads: int, head_dim: int) -> tuple[tuple[str, Fill], ...]:
    """Rules for the DiT's tensors; the first pattern that matches a name's end decides."""
    return (
        (r"rope\.inv_freq", _rope_inv_freq),
        (r"attn\.qkv_proj\.weight", _grouped_value_rows(num_heads, head_dim, 2.0)),
        (r"norm\d?\.weight", _around(1.0, 0.2)),
        (r"adaln_proj\.linear\.weight", _matrix(0.5)),
        (r"weight", _matrix()),
        (r"bias", _around(0.0, 0.2)),
    )


TEXT_ENCODER_RULES: tuple[tuple[str, Fill], ...] = (
    (r"embed_tokens\.weight|pos_embed\.weight", _around(0.0, 1.0)),
    (r"norm\d?\.weight|layernorm\.weight", _around(1.0, 0.1)),
    (r"weight", _matrix()),
    (r"bias", _around(0.0, 0.1)),
)

VIDEO_VAE_RULES: tuple[tuple[str, Fill], ...] = (
    (r"register_tokens|mask_token", _around(0.0, 1.0)),
    (r"scale\d", _around(0.4, 0.1)),
    (r"norm\w*\.weight", _around(1.0, 0.1)),
    (r"weight", _matrix()),
    (r"bias", _around(0.0, 0.1)),
)

AUDIO_VAE_RULES: tuple[tuple[str, Fill], ...] = (
    (r"filter", lambda noise: kaiser_sinc_filter().expand_as(noise)),
    (r"zero_k_bias", lambda noise: torch.zeros_like(noise)),
    # g is what the norm of a row becomes: loud enough to hear, and far enough from the clamp at -1 and 1.
    (r"decoder\.(conv_pre|ups\.\d\.0)\.parametrizations\.weight\.original0", lambda noise: 0.8 + 0.05 * noise.abs()),
    (r"parametrizations\.weight\.original0", lambda noise: 0.45 + 0.05 * noise.abs()),
    (r"decoder\.\w+.*\.act\.(alpha|beta)", _around(0.0, 0.3)),  # stored as logarithms
    (r"alpha", lambda noise: 1.0 + 0.2 * noise.abs()),
    (r"norm\d?\.weight", _around(1.0, 0.1)),
    (r"weight|original1", _matrix()),
    (r"bias|[qv]_bias", _around(0.0, 0.05)),
)


def fill(shapes: Mapping[str, Tensor], rules: Iterable[tuple[str, Fill]], seed: int, salt: str) -> dict[str, Tensor]:
    """Values for the (meta) tensors ``shapes``, in their dtypes. Each has a generator of its own, from its name.

    Raises ValueError when no rule covers a name.
    """
    compiled = [(re.compile(rf"(.*\.)?({pattern})"), rule) for pattern, rule in rules]
    out = {}
    for name, like in shapes.items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{salt}/{name}".encode()))
        noise = torch.randn(like.shape, generator=generator)
        rule = next((rule for pattern, rule in compiled if pattern.fullmatch(name)), None)
        if rule is None:
            raise ValueError(f"no rule for {name}")
        out[name] = rule(noise).to(like.dtype).contiguous()
    return out
