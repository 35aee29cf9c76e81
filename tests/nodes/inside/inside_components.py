"""H3 Component: what it offers, and that Load H3 reads it and shows what it found."""

from pathlib import Path

import folder_paths
import pytest

from comfyui_h3.h3core.config import ComponentSource
from comfyui_h3.h3core.tiny import write_comfyui
from comfyui_h3.h3core.tiny.write import write_official
from comfyui_h3.nodes import load
from comfyui_h3.nodes.component import IN_THE_MODEL, H3Component, component_files
from comfyui_h3.nodes.load import H3LoadModel


@pytest.fixture
def models(host_folders, monkeypatch):
    """A tiny release, and a transformer as ComfyUI has it, in the host's folders."""
    root = host_folders[0]
    for name in ("diffusion_models", "text_encoders", "vae"):
        (root / name).mkdir()
        suffixes = {".safetensors", ".gguf"}
        monkeypatch.setitem(folder_paths.folder_names_and_paths, name, ([str(root / name)], suffixes))
    write_official(root / "minimax_h3/tiny")
    file = root / "diffusion_models/h3/fl2va.safetensors"
    write_comfyui.save(write_comfyui.transformer_file(0, "fl2va"), file)
    (root / "diffusion_models/other.gguf").write_bytes(b"GGUF")
    return root


def test_files_and_folders_are_offered_by_name(models):
    found = component_files()
    assert found["diffusion_models/h3/fl2va.safetensors"] == models / "diffusion_models/h3/fl2va.safetensors"
    assert found["minimax_h3/tiny/FL2VA/video_vae/source"] == models / "minimax_h3/tiny/FL2VA/video_vae/source"
    assert not any(name.endswith(".gguf") for name in found)


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "diffusion_models/../x", "gone.safetensors"])
def test_a_file_that_is_not_offered_is_refused(models, file):
    assert f"file={file!r} is not there" in H3Component.validate_inputs(component="transformer", file=file)


def test_choices_become_a_chain(models):
    first = H3Component.execute("video_vae", IN_THE_MODEL, "official").args[0]
    both = H3Component.execute("transformer", "diffusion_models/h3/fl2va.safetensors", "auto", first).args[0]
    file = Path(models / "diffusion_models/h3/fl2va.safetensors")
    assert both == (
        ComponentSource(component="video_vae", layout="official"),
        ComponentSource(component="transformer", path=file),
    )


def test_load_h3_shows_what_it_found(models, monkeypatch):
    lines = []
    monkeypatch.setattr(load, "show_text", lines.append)
    file = "diffusion_models/h3/fl2va.safetensors"
    chain = H3Component.execute("transformer", file, "auto").args[0]
    engine = H3LoadModel.execute("tiny", "fl2va", "cpu", "float32", components=chain).args[0]
    assert engine.checkpoints.first.transformer.folder == models / file
    assert f"{models / file}: comfyui layout (qkv rows stacked" in lines[0]


def test_fingerprint_follows_the_file(models):
    choice = {"component": "transformer", "file": "diffusion_models/h3/fl2va.safetensors", "layout": "auto"}
    before = H3Component.fingerprint_inputs(**choice)
    assert before == H3Component.fingerprint_inputs(**choice)
    with (models / choice["file"]).open("ab") as file:
        file.write(b"0")
    assert H3Component.fingerprint_inputs(**choice) != before
