"""The engine with LoRAs, against an engine over a checkpoint whose weights were merged by the formula."""

import os
import shutil

import pytest
import torch
from safetensors.torch import load_file

from comfyui_h3.h3core.config import EngineConfig
from comfyui_h3.h3core.engine import Engine
from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.registry import get_engine
from comfyui_h3.h3core.tiny.write import save_sharded
from comfyui_h3.h3core.types import Request
from comfyui_h3.tests.h3core.lora.lora_files import comfyui, diffusers, interleave, make_factors
from comfyui_h3.tests.tolerances import PARITY, relative_error

REQUEST = Request(prompt="a red ball", width=64, height=64, num_frames=22)


@pytest.fixture(scope="module")
def loras(tmp_path_factory):
    """Two files with their strengths, and parameter -> what both add to it."""
    folder = tmp_path_factory.mktemp("loras")
    first, second = comfyui(make_factors(1)), diffusers(make_factors(2), alpha=2)
    files = (first.save(folder / "a.safetensors"), 0.75), (second.save(folder / "b.safetensors"), -0.5)
    return files, {name: 0.75 * delta - 0.5 * second.deltas[name] for name, delta in first.deltas.items()}


@pytest.fixture(scope="module")
def merged_h3(tiny_h3, loras, tmp_path_factory):
    """The tiny H3 with both merged into its files, stored in float32 so that nothing is rounded."""
    folder = tmp_path_factory.mktemp("merged") / "h3"
    shutil.copytree(tiny_h3 / "FL2VA", folder / "FL2VA")
    transformer = folder / "FL2VA" / "transformer"
    tensors = {}
    for shard in sorted(transformer.glob("*.safetensors")):
        tensors |= load_file(shard)
        shard.unlink()
    for name, delta in loras[1].items():
        rows = interleave(delta) if "qkv_proj" in name else delta
        tensors[name] = (tensors[name].double() + rows).float()
    save_sharded(tensors, transformer, "model", 3)
    return folder


def run(folder, loras=(), precision="float32"):
    """(conditioning,) latents and engine."""
    settings = {"device": "cpu", "partition": "fl2va", "precision": precision}
    engine = Engine(EngineConfig(checkpoint=folder, loras=loras, **settings))
    return engine.sample(engine.encode(REQUEST), sigma_points=4), engine


@pytest.fixture(scope="module")
def plain(tiny_h3):
    return run(tiny_h3)[0]


def test_latents_are_those_of_merged_files(tiny_h3, merged_h3, loras, plain):
    ours, theirs = run(tiny_h3, loras[0])[0], run(merged_h3)[0]
    for one, other, before in ((ours.video, theirs.video, plain.video), (ours.audio, theirs.audio, plain.audio)):
        assert relative_error(one, other) < PARITY
        assert relative_error(before, other) > 100 * PARITY


def test_modulation_alone_moves_the_latents(tiny_h3, plain, tmp_path):
    """Its projections are read apart from the transformer."""
    modules = {name: (rows, columns, "") for name, rows, columns in [("blocks.1.adaln_proj.linear", 1152, 40)]}
    path = comfyui(make_factors(3, modules)).save(tmp_path / "a.safetensors")
    assert relative_error(run(tiny_h3, ((path, 1.0),))[0].video, plain.video) > 100 * PARITY


def test_8_bit_weights_are_made_of_the_merged_ones(tiny_h3, merged_h3, loras):
    (_, ours), (_, theirs), (_, before) = (run(*args, precision="fp8") for args in _pairs(tiny_h3, merged_h3, loras[0]))
    ours, theirs, before = (engine._weights._loaded["dit"].state_dict() for engine in (ours, theirs, before))
    in_8_bits = [name for name, tensor in ours.items() if tensor.dtype == torch.float8_e4m3fn]
    assert set(loras[1]) & set(in_8_bits)
    for name in in_8_bits:
        values, scale = ours[name].float(), ours[name.replace(".weight", ".weight_scale")]
        wanted, wanted_scale = theirs[name].float(), theirs[name.replace(".weight", ".weight_scale")]
        # The formula in float64 falls to the other side of a rounding boundary of bfloat16 now and then.
        assert (values != wanted).float().mean() < 1e-3, name
        torch.testing.assert_close(scale, wanted_scale, rtol=2**-8, atol=0)
        if name in loras[1]:
            assert (before[name].float() != wanted).float().mean() > 0.1


def _pairs(tiny_h3, merged_h3, loras):
    return (tiny_h3, loras), (merged_h3,), (tiny_h3,)


@pytest.mark.parametrize("strength", [0.0, -0.0])
def test_strength_0_gives_the_same_bits_as_none(tiny_h3, loras, plain, strength):
    latents, _ = run(tiny_h3, ((loras[0][0][0], strength),))
    assert torch.equal(latents.video, plain.video)
    assert torch.equal(latents.audio, plain.audio)


def test_without_it_the_base_is_back_bit_for_bit(tiny_h3, loras, plain):
    run(tiny_h3, loras[0])
    latents, _ = run(tiny_h3)
    assert torch.equal(latents.video, plain.video)


def test_description_has_the_counts(tiny_h3, loras):
    text = Engine(EngineConfig(checkpoint=tiny_h3, device="cpu", loras=loras[0])).describe()
    assert "LoRA a.safetensors x 0.75 (ComfyUI: 45 keys applied, 0 ignored, 0 failed)" in text
    assert "LoRA b.safetensors x -0.5 (diffusers: 38 keys applied, 0 ignored, 0 failed)" in text


def test_it_serves_both_partitions(tiny_h3, loras):
    engine = Engine(EngineConfig(checkpoint=tiny_h3, device="cpu", loras=loras[0]))
    assert len(engine.checkpoints.opened) == 2
    assert all(checkpoint.transformer.through is not None for checkpoint in engine.checkpoints.opened.values())


def test_same_loras_are_the_same_engine_and_others_another(tiny_h3, loras):
    config = {"checkpoint": tiny_h3, "device": "cpu"}
    one = get_engine(EngineConfig(**config, loras=loras[0]))
    assert get_engine(EngineConfig(**config, loras=loras[0])) is one
    assert get_engine(EngineConfig(**config)) is not one
    assert get_engine(EngineConfig(**config, loras=loras[0][::-1])) is not one
    os.utime(loras[0][0][0], (1, 1))
    assert get_engine(EngineConfig(**config, loras=loras[0])) is not one


@pytest.mark.parametrize("strength", [float("nan"), float("inf"), "1", None])
def test_strength_that_is_no_number_is_refused(tiny_h3, strength):
    with pytest.raises(RequestError, match=r"of the LoRA a.safetensors is not possible; use a finite number"):
        EngineConfig(checkpoint=tiny_h3, device="cpu", loras=(("x/a.safetensors", strength),))


def test_a_lora_that_changes_nothing_is_refused_before_any_weight_is_read(tiny_h3, tmp_path):
    path = comfyui(make_factors(0, {"blocks.99.mlp.fc1": (192, 64, "")})).save(tmp_path / "a.safetensors")
    with pytest.raises(RequestError, match="would change nothing"):
        Engine(EngineConfig(checkpoint=tiny_h3, device="cpu", loras=((path, 1.0),)))
