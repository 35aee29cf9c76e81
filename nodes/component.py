"""H3 Component: one component of a model from another file or folder, for Load H3."""

from pathlib import Path

import folder_paths
from comfy_api.latest import io

from comfyui_h3.h3core.checkpoint.index import fingerprint
from comfyui_h3.h3core.config import COMPONENTS, LAYOUTS, ComponentSource
from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.nodes._compat import make
from comfyui_h3.nodes.checks import verdict
from comfyui_h3.nodes.load import checkpoints
from comfyui_h3.nodes.models import FOLDER, component_folders
from comfyui_h3.nodes.types import H3Components

IN_THE_MODEL = "(that of the model)"
HOST_FOLDERS = ("diffusion_models", "text_encoders", "vae")


class H3Component(io.ComfyNode):
    """One link of a chain; the files are opened by Load H3, which shows what it found them to be."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="H3Component",
            display_name="H3 Component",
            category="MiniMax H3",
            description="Takes one component of a model from another file or folder: a ComfyUI single file, or a "
            "folder of another checkpoint. Sizes stay those of the model that Load H3 opens.",
            search_aliases=["minimax", "hailuo", "h3", "diffusion model", "unet", "vae", "text encoder", "clip"],
            inputs=[
                io.Combo.Input(
                    "component",
                    options=list(COMPONENTS),
                    tooltip="transformer: that of fl2va (text and keyframes). transformer_ref: that of ref2va "
                    "(references). The others serve both.",
                ),
                io.Combo.Input(
                    "file",
                    options=[IN_THE_MODEL, *component_files()],
                    default=IN_THE_MODEL,
                    tooltip=f"A .safetensors file below models/{', models/'.join(HOST_FOLDERS)}, or a component's "
                    f"folder below models/{FOLDER}.",
                ),
                make(
                    io.Combo.Input,
                    "layout",
                    options=list(LAYOUTS),
                    default="auto",
                    tooltip="How the file names and orders tensors. auto finds it out, and refuses where the file does "
                    "not say; Load H3 shows what was found. official and comfyui differ in a transformer's fused rows: "
                    "q, k and v interleaved per head, or stacked.",
                    advanced=True,
                ),
                H3Components.Input(
                    "components", optional=True, tooltip="Of other H3 Component nodes: one for each component."
                ),
            ],
            outputs=[
                H3Components.Output(
                    "all_components", display_name="components", tooltip="Goes to Load H3, or to the next H3 Component."
                )
            ],
        )

    @classmethod
    def validate_inputs(cls, component=None, file=None, layout=None) -> bool | str:
        return verdict(
            lambda: ComponentSource(component=component or COMPONENTS[0], layout=layout or LAYOUTS[0]),
            lambda: file is None or component_path(file),
        )

    @classmethod
    def fingerprint_inputs(cls, component=None, file=None, layout=None, components=None) -> str:
        path = component_files().get(file)
        return fingerprint(path) if path else ""

    @classmethod
    def execute(cls, component, file, layout, components=()) -> io.NodeOutput:
        source = ComponentSource(component=component, path=component_path(file), layout=layout)
        return io.NodeOutput((*components, source))


def component_files() -> dict[str, Path]:
    """Files in the host's model folders and components of checkpoints, by the name to choose them by."""
    found: dict[str, Path] = {}
    for folder in HOST_FOLDERS:
        for name in folder_paths.get_filename_list(folder):
            path = folder_paths.get_full_path(folder, name)
            if path is not None and name.endswith(".safetensors"):
                found[f"{folder}/{Path(name).as_posix()}"] = Path(path)
    for name, checkpoint in checkpoints().items():
        for part, path in component_folders(checkpoint).items():
            found[f"{FOLDER}/{name}/{part}"] = path
    return found


def component_path(file: str) -> Path | None:
    """Where a choice lies; a name is looked up, never joined to a path. Raises RequestError when it is not there."""
    if file == IN_THE_MODEL:
        return None
    found = component_files()
    if file not in found:
        raise RequestError(
            f"file={file!r} is not there; put it below models/{', models/'.join(HOST_FOLDERS)} or models/{FOLDER}, "
            "then refresh the page and choose it"
        )
    return found[file]
