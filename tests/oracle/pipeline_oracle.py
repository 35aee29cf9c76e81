"""diffusers' own H3 classes over the tiny H3: what the engine's numbers are compared with."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from comfyui_h3.h3core.tiny import configs
from comfyui_h3.h3core.tiny.write_diffusers import write_diffusers


@cache
def diffusers_folder(root: Path, seed: int = 0) -> Path:
    """The tiny H3 in the layout of diffusers, written below ``root``."""
    folder = root / f"diffusers-{seed}"
    write_diffusers(folder, seed)
    return folder


def transformer(folder: Path, dtype: torch.dtype = torch.float32, name: str = "transformer") -> Any:
    """The diffusers transformer: the file's bfloat16 with its float32 islands, or all of it in float32."""
    from diffusers import MiniMaxH3Transformer3DModel

    model = load_model(MiniMaxH3Transformer3DModel, folder / name)
    return model.float() if dtype == torch.float32 else model


def load_model(cls: Any, folder: Path) -> Any:
    """A diffusers model with the tensors of ``folder``, in their own dtypes (``from_pretrained`` needs accelerate).

    Copies, which PyTorch aligns: a product with one row is added up in an order that depends on the addresses, and
    those of a mapped file on the lengths of the names in its header.
    """
    model = cls.from_config(json.loads((folder / "config.json").read_text()))
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= {name: tensor.clone() for name, tensor in load_file(file).items()}
    model.load_state_dict(tensors, strict=True, assign=True)
    return model.eval()


class TextOnlyProcessor:
    """The one method of ``Qwen3VLProcessor`` that a request without media uses; the real one needs torchvision."""

    def create_mm_token_type_ids(self, ids: list[list[int]]) -> list[list[int]]:
        return [[0] * len(row) for row in ids]


def pipeline(folder: Path, dtype: torch.dtype = torch.float32, *, short_edge: int | None = None) -> Any:
    """The modular pipeline; components loaded from ``folder``, the tiny tap and short clips allowed.

    short_edge: of reference pictures and clips, with which media are possible; they need torchvision.
    """
    from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, MiniMaxH3Scheduler
    from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3Blocks, MiniMaxH3ModularPipeline
    from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

    class TinyPipeline(MiniMaxH3ModularPipeline):
        text_encoder_layer = configs.TAP
        min_duration = 0.0

    pipe = MiniMaxH3Blocks().init_pipeline()
    pipe.__class__ = TinyPipeline
    pipe.update_components(
        text_encoder=Qwen3VLForConditionalGeneration.from_pretrained(folder / "text_encoder", dtype=dtype).eval(),
        tokenizer=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        processor=TextOnlyProcessor() if short_edge is None else _processor(folder),
        vae=load_model(AutoencoderKLMiniMaxH3, folder / "vae"),
        audio_vae=load_model(AutoencoderKLMiniMaxH3Audio, folder / "audio_vae"),
        transformer=transformer(folder, dtype),
        transformer_ref=transformer(folder, dtype, "transformer_ref"),
        scheduler=MiniMaxH3Scheduler.from_pretrained(folder / "scheduler"),
        audio_scheduler=MiniMaxH3Scheduler.from_pretrained(folder / "audio_scheduler"),
    )
    if short_edge is not None:
        pipe.register_to_config(canvas_short_edge=short_edge, reference_image_short_edge=short_edge)
    return pipe


def _processor(folder: Path) -> Any:
    from transformers import Qwen3VLProcessor

    return Qwen3VLProcessor.from_pretrained(folder / "processor")
