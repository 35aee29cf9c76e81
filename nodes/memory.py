"""Room on a device that the host uses as well."""

import comfy.model_management

from comfyui_h3.h3core.engine import Engine
from comfyui_h3.h3core.types import Conditioning, EncodedMedia, Latents


def host_device(choice: str) -> str:
    """The device of a choice: "auto" is the one the host works on, which --cpu and --cuda-device set."""
    return str(comfy.model_management.get_torch_device()) if choice == "auto" else choice


def make_room(engine: Engine, stage: str, given: EncodedMedia | Conditioning | Latents | None = None) -> None:
    """Has the host unload as many of its models as the stage needs memory for what it will get."""
    num_bytes = engine.missing_bytes(stage, given)
    if num_bytes:
        comfy.model_management.free_memory(num_bytes, engine.device)
