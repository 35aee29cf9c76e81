"""Sizes of the text encoder: a Qwen3-VL whose residual stream is tapped before its last layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from comfyui_h3.h3core.errors import CheckpointError
from comfyui_h3.h3core.models.fields import check_fields

RELEASE_TAP = 50
VISION_ROPE_THETA = 10000.0

_TEXT_LIKE: dict[str, Any] = {"num_hidden_layers": 64, "hidden_size": 5120, "vocab_size": 151936}
_VISION_LIKE: dict[str, Any] = {"deepstack_visual_indexes": [8, 16, 24], "spatial_merge_size": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEncoderConfig:
    """``tap``: number of decoder layers that run; their output, without a final norm, is the conditioning."""

    hf_config: Mapping[str, Any]
    tap: int
    num_file_layers: int
    hidden_size: int
    vocab_size: int
    rope_theta: float
    merge_size: int

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str, tap: int | None = None) -> TextEncoderConfig:
        """From the parsed ``text_encoder/config.json`` at ``source``. ``tap`` None means the release's 50.

        Raises CheckpointError when the file describes another model, or has fewer layers than the tap.
        """
        if values.get("model_type") != "qwen3_vl":
            raise CheckpointError(
                f"{source} describes {values.get('model_type')!r}; H3 needs its own 'qwen3_vl' encoder"
            )
        text: Any = values.get("text_config")
        vision: Any = values.get("vision_config")
        for name, part, like in (("text_config", text, _TEXT_LIKE), ("vision_config", vision, _VISION_LIKE)):
            # transformers owns this file and reads more of it; what is read here has to be there.
            others = frozenset(part) - like.keys() if isinstance(part, Mapping) else frozenset()
            check_fields(part, f"{source}, {name}", like=like, fixed={}, ignored=others)
        num_layers = text["num_hidden_layers"]
        tap = RELEASE_TAP if tap is None else tap
        if not isinstance(tap, int) or not 1 <= tap <= num_layers:
            raise CheckpointError(
                f"{source} has {num_layers} text layers, H3 reads its states after layer {tap!r} (text_encoder_tap); "
                "give the encoder that came with the checkpoint"
            )
        deepstack = len(vision["deepstack_visual_indexes"])
        if tap <= deepstack:
            raise CheckpointError(f"{source}: tap {tap} lies inside the {deepstack} layers that visual features enter")
        rope = text.get("rope_parameters") or {}
        return cls(
            hf_config=values,
            tap=tap,
            num_file_layers=num_layers,
            hidden_size=text["hidden_size"],
            vocab_size=text["vocab_size"],
            rope_theta=float(text.get("rope_theta", rope.get("rope_theta", 5e6))),
            merge_size=vision["spatial_merge_size"],
        )
