"""Sizes of the DiT, read from the official ``transformer/config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from comfyui_h3.h3core.errors import CheckpointError
from comfyui_h3.h3core.models.fields import check_fields

CLASS_NAME = "MiniMaxH3DiTModel"
MAX_LAYERS = 1000  # twenty times the release; past it a config is damaged, and building it would not end
PATCH = 2  # latents per patch, in both directions of a frame
NUM_MODALITIES = 3  # video, text, audio: thirds of a block's modulation table
NUM_CHUNKS = 6  # shift, scale, gate of attention, then of the MLP


@dataclass(frozen=True, slots=True, kw_only=True)
class DiTConfig:
    """Sizes of one DiT; the defaults are those of the released one (33.1 billion weights).

    ``rope_inv_freq_len`` frequencies turn each of the axes t, h, w: ``6 * rope_inv_freq_len`` channels of a head turn.
    """

    hidden_size: int = 5376
    num_layers: int = 50
    token_refiner_num_layers: int = 2
    num_attention_heads: int = 56
    attention_head_dim: int = 128
    ffn_hidden_size: int = 14336
    latents_dim: int = 24
    audio_latents_dim: int = 32
    text_dim: int = 5120
    timestep_input_dim: int = 256
    time_embed_hidden_size: int = 5376
    time_embed_dim: int = 2688
    rope_inv_freq_len: int = 16
    norm_eps: float = 1e-5
    qk_norm_eps: float = 1e-5
    final_norm_eps: float = 1e-5

    @property
    def inner_size(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @property
    def patch_size(self) -> int:
        """Values of one video row: the latent channels of a patch of 2 by 2."""
        return PATCH * PATCH * self.latents_dim

    def bytes_per_row(self, itemsize: int) -> int:
        """Most bytes alive at once for a row of the sequence, weights aside: the stream and the widest layer."""
        return itemsize * (3 * self.hidden_size + max(6 * self.inner_size, 3 * self.ffn_hidden_size))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str) -> DiTConfig:
        """From the parsed JSON of ``source``. Raises CheckpointError for a value that is missing or not supported."""
        if values.get("_class_name") != CLASS_NAME:
            raise CheckpointError(
                f"{source} describes {values.get('_class_name')!r}, not {CLASS_NAME!r}; "
                "give the transformer folder of an official FL2VA or Ref2VA checkpoint"
            )
        release = cls()
        like = {field.name: getattr(release, field.name) for field in fields(cls)}
        derived = {"adaln_out_features", "final_adaln_out_features"}
        check_fields(values, source, like=like, fixed={"patch_size": [1, PATCH, PATCH]}, ignored=derived)
        config = cls(**{name: values[name] for name in like})
        if config.num_layers > MAX_LAYERS or config.token_refiner_num_layers > MAX_LAYERS:
            raise CheckpointError(f"{source} has more than {MAX_LAYERS} layers; take the file of the release")
        for name, expected in (
            ("adaln_out_features", NUM_MODALITIES * NUM_CHUNKS * config.hidden_size),
            ("final_adaln_out_features", 2 * config.hidden_size),
        ):
            if values.get(name, expected) != expected:
                raise CheckpointError(f"{source} says {name}={values[name]}; this engine runs {name}={expected}")
        if 6 * config.rope_inv_freq_len > config.attention_head_dim:
            raise CheckpointError(
                f"{source} turns {6 * config.rope_inv_freq_len} channels (6 * rope_inv_freq_len) "
                f"of heads that have {config.attention_head_dim}"
            )
        return config
