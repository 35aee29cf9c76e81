"""Imports point down: nodes -> h3core -> kernels, and inside h3core the models know nothing of what carries them."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOST = ("comfy.", "comfy_api.", "comfy_execution.", "comfy_extras.", "folder_paths.", "server.", "execution.", "nodes.")
FORBIDDEN = {
    "kernels": (*HOST, "comfyui_h3.h3core.", "comfyui_h3.nodes.", "comfyui_h3.scripts."),
    "h3core": (*HOST, "comfyui_h3.nodes.", "comfyui_h3.scripts."),
    "nodes": ("comfyui_h3.kernels.", "comfyui_h3.scripts."),
    "h3core/models": (
        "comfyui_h3.h3core.engine.",
        "comfyui_h3.h3core.request.",
        "comfyui_h3.h3core.checkpoint.",
        "comfyui_h3.h3core.parallel.",
        "comfyui_h3.h3core.sampling.",
        "comfyui_h3.h3core.accel.",
    ),
    "h3core/media": ("comfyui_h3.h3core.engine.", "comfyui_h3.h3core.models.", "comfyui_h3.h3core.checkpoint."),
    "h3core/prompt": (
        "comfyui_h3.h3core.engine.",
        "comfyui_h3.h3core.checkpoint.",
        "comfyui_h3.h3core.sampling.",
        "comfyui_h3.h3core.models.text_encoder.template.",
    ),
    "h3core/sampling": ("comfyui_h3.h3core.engine.", "comfyui_h3.h3core.checkpoint."),
}


def imported_names(path):
    """Full dotted names that a file imports, relative ones with their dots in front."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("layer", FORBIDDEN)
def test_imports_point_down(layer):
    for path in (ROOT / layer).rglob("*.py"):
        for name in imported_names(path):
            assert not f"{name}.".startswith(FORBIDDEN[layer]), f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("layer", ["nodes", "h3core", "kernels", "scripts", "tests", "benchmarks"])
def test_imports_are_absolute(layer):
    for path in (ROOT / layer).rglob("*.py"):
        for name in imported_names(path):
            assert not name.startswith("."), f"{path.relative_to(ROOT)} imports {name}: one module, one name"
