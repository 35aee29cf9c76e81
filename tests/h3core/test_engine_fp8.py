"""precision=fp8 on a CPU, where only weights are in 8 bits: near bfloat16, never the same, and said."""

import pytest
import torch

from comfyui_h3.h3core.config import EngineConfig
from comfyui_h3.h3core.engine import Engine
from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.types import Request

REQUEST = Request(prompt="a red ball", width=64, height=64, num_frames=22)


def relative_distance(a, b):
    return float((a.float() - b.float()).norm() / b.float().norm())


def run(folder, precision, conditioning=None):
    engine = Engine(EngineConfig(checkpoint=folder, device="cpu", precision=precision))
    conditioning = conditioning or engine.encode(REQUEST)
    return engine, conditioning, engine.sample(conditioning, sigma_points=4)


@pytest.fixture(scope="module")
def plain(tiny_h3):
    return run(tiny_h3, "bfloat16")


def test_result_is_near_bfloat16_and_not_the_same(tiny_h3, plain):
    _, conditioning, latents = plain
    engine, ours, _ = run(tiny_h3, "fp8")
    _, _, sampled = run(tiny_h3, "fp8", conditioning)
    assert ours.text.dtype == torch.bfloat16
    assert 0.005 < relative_distance(ours.text, conditioning.text) < 0.1  # five layers of 2.6 % each
    assert 0.001 < relative_distance(sampled.video, latents.video) < 0.1
    assert 0.001 < relative_distance(sampled.audio, latents.audio) < 0.1
    assert engine.dtype == torch.bfloat16


def test_it_is_the_same_in_every_run(tiny_h3):
    one, other = (run(tiny_h3, "fp8")[2] for _ in range(2))
    assert torch.equal(one.video, other.video)
    assert torch.equal(one.audio, other.audio)


def test_description_names_it(tiny_h3):
    engine = Engine(EngineConfig(checkpoint=tiny_h3, device="cpu", precision="fp8"))
    assert "fp8" in engine.describe()


def test_attention_in_8_bits_is_refused_where_it_cannot_run(tiny_h3):
    with pytest.raises(RequestError, match="attention=fa3_fp8 cannot run: the device is cpu"):
        Engine(EngineConfig(checkpoint=tiny_h3, device="cpu", precision="fp8", attention="fa3_fp8"))


@pytest.mark.gpu
def test_gpu_is_near_the_cpu(tiny_h3):
    """There rows are rounded, too, where the GPU multiplies in 8 bits."""
    _, conditioning, latents = run(tiny_h3, "fp8")
    engine = Engine(EngineConfig(checkpoint=tiny_h3, device="cuda", precision="fp8"))
    assert relative_distance(engine.encode(REQUEST).text, conditioning.text) < 0.1
    assert relative_distance(engine.sample(conditioning, sigma_points=4).video, latents.video) < 0.1
