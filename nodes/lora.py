"""H3 LoRA: files of the host's loras folder, chained, for Load H3."""

from pathlib import Path

import folder_paths
from comfy_api.latest import io

from comfyui_h3.h3core.checkpoint.index import fingerprint, some_of
from comfyui_h3.h3core.config import LoraChoice
from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.lora.file import LoraFile
from comfyui_h3.nodes._compat import make
from comfyui_h3.nodes.checks import expect_chain, verdict
from comfyui_h3.nodes.progress import show_text
from comfyui_h3.nodes.types import H3Loras

FOLDER = "loras"  # the host's own
NONE_FOUND = "(no LoRA found: put .safetensors files into models/loras)"
MAX_STRENGTH = 10.0


class H3LoRA(io.ComfyNode):
    """One file at one strength; chained, so that a bypass takes out exactly one."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="H3LoRA",
            display_name="H3 LoRA",
            category="MiniMax H3",
            description="Adds a LoRA to the transformer of Load H3, which says what became of its keys. Chain several; "
            "their changes add up. Another file or strength has the weights read again.",
            search_aliases=["minimax", "hailuo", "h3", "lora", "adapter", "turbo", "style"],
            inputs=[
                io.Combo.Input(
                    "lora",
                    options=list(lora_names()) or [NONE_FOUND],
                    tooltip="File in models/loras, .safetensors, made for MiniMax H3: native, diffusers, kohya or "
                    "ComfyUI names. FastH3 adapters and DoRA are refused.",
                ),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=-MAX_STRENGTH,
                    max=MAX_STRENGTH,
                    step=0.05,
                    tooltip=f"-{MAX_STRENGTH:g} to {MAX_STRENGTH:g}. 1: as trained. 0: changes nothing. Negative: the "
                    "opposite of what was trained.",
                ),
                H3Loras.Input("loras", optional=True, tooltip="From another H3 LoRA."),
            ],
            outputs=[H3Loras.Output("all_loras", display_name="loras", tooltip="For Load H3 or the next H3 LoRA.")],
        )

    @classmethod
    def validate_inputs(cls, lora=None, strength=None) -> bool | str:
        return verdict(lambda: lora is None or LoraFile.open(lora_path(lora)), lambda: check_strength(strength))

    @classmethod
    def fingerprint_inputs(cls, lora=None, strength=None, loras=None) -> str:
        name = None if lora is None else find_lora(lora)
        return "" if name is None else fingerprint(lora_path(name))

    @classmethod
    def execute(cls, lora, strength, loras=()) -> io.NodeOutput:
        chain = expect_chain(loras, LoraChoice, "H3 LoRA")
        check_strength(strength)
        file = LoraFile.open(lora_path(lora))
        show_text(f"{len(file.entries)} tensors x {strength:g}")
        return io.NodeOutput((*chain, LoraChoice(path=file.path, strength=strength)))


def lora_names() -> tuple[str, ...]:
    """What the host has in its loras folders and this can read."""
    return tuple(name for name in folder_paths.get_filename_list(FOLDER) if name.endswith(".safetensors"))


def find_lora(name: str) -> str | None:
    """The host's name of a file; a graph saved on another system may have the other slash in it."""
    wanted = name.replace("\\", "/")
    return next((known for known in lora_names() if known.replace("\\", "/") == wanted), None)


def lora_path(name: str) -> Path:
    """The file of a choice. A name is looked up, never joined to a path. Raises RequestError when it is not there."""
    roots = " or ".join(folder_paths.get_folder_paths(FOLDER))
    known = find_lora(name)
    path = None if known is None else folder_paths.get_full_path(FOLDER, known)
    if path is None:
        names = some_of(list(lora_names()), most=10) or "none: put .safetensors files there, then refresh the page"
        raise RequestError(f"lora={name!r} is not in {roots}; choose one of what is there ({names})")
    return Path(path)


def check_strength(strength: float | None) -> None:
    """Raises RequestError for a strength out of range; None is a linked input."""
    if strength is not None and not -MAX_STRENGTH <= strength <= MAX_STRENGTH:
        raise RequestError(
            f"strength={strength} is not possible; use -{MAX_STRENGTH:g} to {MAX_STRENGTH:g}, 1 as trained"
        )
