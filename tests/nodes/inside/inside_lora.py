"""H3 LoRA: what is offered, what is refused before a job is queued, and what Load H3 gets."""

import os

import folder_paths
import pytest
import torch

from comfyui_h3.h3core.config import LoraChoice
from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.nodes.load import H3LoadModel
from comfyui_h3.nodes.lora import NONE_FOUND, H3LoRA
from comfyui_h3.tests.h3core.lora.lora_files import Lora, comfyui, make_factors


@pytest.fixture
def loras(monkeypatch, tmp_path):
    """The host's loras folder."""
    folder = tmp_path / "loras"
    (folder / "style").mkdir(parents=True)
    kinds = {".safetensors", ".pt"}
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "loras", ([str(folder)], kinds))
    monkeypatch.setattr(folder_paths, "filename_list_cache", {})
    return folder


def offered():
    return next(socket for socket in H3LoRA.define_schema().inputs if socket.id == "lora").options


def test_safetensors_of_the_host_are_offered(loras):
    assert offered() == [NONE_FOUND]
    comfyui(make_factors(0)).save(loras / "style" / "a.safetensors")
    (loras / "b.pt").write_bytes(b"")
    folder_paths.filename_list_cache.clear()
    assert offered() == [os.path.join("style", "a.safetensors")]


@pytest.mark.parametrize("name", ["style/a.safetensors", "style\\a.safetensors"])
def test_links_of_the_chain_are_in_order(loras, shown, name):
    path = comfyui(make_factors(0)).save(loras / "style" / "a.safetensors")
    assert H3LoRA.validate_inputs(lora=name, strength=0.5) is True
    (first,) = H3LoRA.execute(lora=name, strength=0.5).args
    (both,) = H3LoRA.execute(lora=name, strength=-1.0, loras=first).args
    assert both == (LoraChoice(path, 0.5), LoraChoice(path, -1.0))
    assert shown[-1] == "45 tensors x -1"


@pytest.mark.parametrize("name", ["../b.safetensors", "b.safetensors", "/etc/b.safetensors", "b.pt", ""])
def test_names_that_are_not_offered_are_refused(loras, name):
    comfyui(make_factors(0)).save(loras.parent / "b.safetensors")
    (loras / "b.pt").write_bytes(b"")
    assert "choose one of what is there" in H3LoRA.validate_inputs(lora=name, strength=1.0)
    assert H3LoRA.fingerprint_inputs(lora=name, strength=1.0) == ""
    with pytest.raises(RequestError, match="is not in"):
        H3LoRA.execute(lora=name, strength=1.0)


@pytest.mark.parametrize("strength", [10.5, -11, float("nan")])
def test_strength_out_of_range_is_refused(loras, strength):
    comfyui(make_factors(0)).save(loras / "a.safetensors")
    assert "use -10 to 10" in H3LoRA.validate_inputs(lora="a.safetensors", strength=strength)


def test_files_of_another_kind_are_refused_before_the_job(loras):
    Lora(tensors={"x": torch.ones(1)}, metadata={"format": "fastvideo-lora-v2"}).save(loras / "a.safetensors")
    assert "FastH3 adapter" in H3LoRA.validate_inputs(lora="a.safetensors", strength=1.0)


def test_fingerprint_follows_the_file(loras):
    path = comfyui(make_factors(0)).save(loras / "a.safetensors")
    before = H3LoRA.fingerprint_inputs(lora="a.safetensors", strength=1.0, loras=None)
    assert before == H3LoRA.fingerprint_inputs(lora="a.safetensors", strength=1.0)
    os.utime(path, (1, 1))
    assert H3LoRA.fingerprint_inputs(lora="a.safetensors", strength=1.0) != before


def test_load_merges_and_says_what_became_of_the_keys(loras, shown, host_folders, tiny_h3):
    comfyui(make_factors(0)).save(loras / "a.safetensors")
    (host_folders[0] / "minimax_h3").mkdir()
    (host_folders[0] / "minimax_h3" / "tiny").symlink_to(tiny_h3, target_is_directory=True)
    (chain,) = H3LoRA.execute(lora="a.safetensors", strength=0.25).args
    settings = {"model": "tiny", "weights": "auto", "device": "cpu", "precision": "auto"}
    (engine,) = H3LoadModel.execute(**settings, loras=chain).args
    assert engine.config.loras == chain
    assert "LoRA a.safetensors x 0.25 (ComfyUI: 45 keys applied, 0 ignored, 0 failed)" in shown[-1]
    (plain,) = H3LoadModel.execute(**settings).args
    assert plain.config.loras == ()


@pytest.mark.parametrize("value", ["a.safetensors", 3, ("a", 1.0), [("a", 1.0)]])
def test_value_in_place_of_a_link_is_refused(loras, value):
    comfyui(make_factors(0)).save(loras / "a.safetensors")
    with pytest.raises(RequestError, match="H3 LoRA"):
        H3LoRA.execute(lora="a.safetensors", strength=1.0, loras=value)
