"""Load H3: a checkpoint below the host's model folders becomes an engine."""

import os
from pathlib import Path

import folder_paths
import torch
from comfy_api.latest import io

from comfyui_h3.h3core.accel.attention import ATTENTIONS
from comfyui_h3.h3core.checkpoint.index import fingerprint
from comfyui_h3.h3core.config import PRECISIONS, WEIGHTS, EngineConfig, LoraChoice
from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.registry import get_engine
from comfyui_h3.nodes._compat import make
from comfyui_h3.nodes.checks import expect_chain, verdict
from comfyui_h3.nodes.memory import host_device
from comfyui_h3.nodes.models import (
    FOLDER,
    NONE_FOUND,
    PARTITION_FOLDERS,
    find_checkpoints,
    has_partition,
)
from comfyui_h3.nodes.progress import show_text
from comfyui_h3.nodes.types import H3Components, H3Engine, H3Loras


class H3LoadModel(io.ComfyNode):
    """Reads configs and shard headers; weights follow when a stage first needs them."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="H3LoadModel",
            display_name="Load H3",
            category="MiniMax H3",
            description="Opens a MiniMax H3 checkpoint. Weights are read when a stage first needs them, and then stay.",
            search_aliases=["minimax", "hailuo", "h3", "t2va", "fl2va", "ref2va", "text to video", "model loader"],
            inputs=[
                io.Combo.Input(
                    "model",
                    options=list(checkpoints()) or [NONE_FOUND],
                    tooltip=f"Folder below models/{FOLDER}, in the layout of the release (it holds FL2VA/, Ref2VA/ "
                    "or both, or is one of them) or in that of diffusers (transformer/, transformer_ref/ or both).",
                ),
                io.Combo.Input(
                    "weights",
                    options=list(WEIGHTS),
                    default="auto",
                    tooltip="fl2va: video from text, with keyframes or without. ref2va: video from references, with "
                    "keyframes or without. auto: each request takes the ones it needs, of those in the folder; this "
                    "node shows which these are.",
                ),
                make(
                    io.Combo.Input,
                    "device",
                    options=["auto", "cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))],
                    default="auto",
                    tooltip="auto: the device that the host works on.",
                    advanced=True,
                ),
                make(
                    io.Combo.Input,
                    "precision",
                    options=list(PRECISIONS),
                    default="auto",
                    tooltip="Of the transformer and the text encoder. auto: bfloat16 on a GPU, float32 on a CPU. "
                    "fp8: their linear layers in 8 bits, made when they are read: half the memory, and faster where "
                    "the GPU multiplies 8 bits (Ada, Hopper and newer). An approximation: the same seed gives another "
                    "video. float16 is not offered: values inside H3 leave its range.",
                    advanced=True,
                ),
                make(
                    io.Combo.Input,
                    "attention",
                    options=list(ATTENTIONS),
                    default="auto",
                    optional=True,  # and the last widget: saved graphs without it keep their meaning
                    tooltip="Of the transformer. auto: the fastest of full precision that runs on this GPU. "
                    "fa3_fp8: FlashAttention 3 in 8 bits (Hopper GPUs, package fa3-fwd), an approximation. The "
                    "others insist on one that auto chooses from.",
                    advanced=True,
                ),
                H3Loras.Input(
                    "loras", optional=True, tooltip="From H3 LoRA: merged into the transformer when it is read."
                ),
                H3Components.Input(
                    "components",
                    optional=True,
                    tooltip="From H3 Component: components that are read from other files. This node shows what it "
                    "found them to be, and how.",
                ),
            ],
            outputs=[H3Engine.Output("engine", display_name="engine", tooltip="Goes to the other H3 nodes.")],
        )

    @classmethod
    def validate_inputs(cls, model=None, weights=None, device=None, precision=None, attention=None) -> bool | str:
        return verdict(
            lambda: EngineConfig(
                checkpoint=Path(),
                partition=weights or "auto",
                device=host_device(device or "auto"),
                precision=precision or "auto",
                attention=attention or "auto",
            ),
            lambda: model is None or checkpoint_folder(model, weights),
        )

    @classmethod
    def fingerprint_inputs(
        cls, model=None, weights=None, device=None, precision=None, attention=None, components=None, loras=None
    ) -> str:
        folder = checkpoints().get(model)
        return fingerprint(folder) if folder else ""

    @classmethod
    def execute(cls, model, weights, device, precision, attention="auto", components=(), loras=()) -> io.NodeOutput:
        engine = get_engine(
            EngineConfig.from_env(
                checkpoint=checkpoint_folder(model, weights),
                partition=weights,
                device=host_device(device),
                precision=precision,
                attention=attention,
                loras=expect_chain(loras, LoraChoice, "H3 LoRA"),
                components=components,
            )
        )
        show_text(engine.describe())
        return io.NodeOutput(engine)


def checkpoints() -> dict[str, Path]:
    """Checkpoints by name: in models/minimax_h3, and where extra_model_paths.yaml says under that key."""
    default = os.path.join(folder_paths.models_dir, FOLDER)
    folder_paths.add_model_folder_path(FOLDER, default)  # after the user's own; a second call changes nothing
    return find_checkpoints(folder_paths.get_folder_paths(FOLDER))


def checkpoint_folder(model: str, weights: str | None) -> Path:
    """The folder of a choice. A name is looked up, never joined to a path. Raises RequestError when it is not there."""
    found = checkpoints()
    roots = " or ".join(folder_paths.get_folder_paths(FOLDER))
    if not found:
        raise RequestError(f"no H3 model found: put the folder that holds FL2VA/ into {roots}, then refresh the page")
    if model not in found:
        raise RequestError(f"model={model!r} is not in {roots}; choose one of {', '.join(found)}")
    if weights is not None and not has_partition(found[model], weights):
        wanted = PARTITION_FOLDERS.get(weights, weights)
        raise RequestError(f"weights={weights}: {found[model]} has no {wanted}/ folder; add it or choose other weights")
    return found[model]
