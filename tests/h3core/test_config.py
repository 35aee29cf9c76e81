"""Engine settings that cannot work are refused when they are made."""

import pytest
import torch

from comfyui_h3.h3core.config import EngineConfig
from comfyui_h3.h3core.errors import RequestError


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"precision": "float16"}, "bfloat16 or float32"),
        ({"precision": "fp16"}, "bfloat16 or float32"),
        ({"precision": "int3"}, "auto, bfloat16, float32, fp8"),
        ({"precision": "fp8", "quality": "exact"}, "precision=fp8 is an approximation"),
        ({"attention": "fa3_fp8", "quality": "exact"}, "attention=fa3_fp8 is an approximation"),
        ({"partition": "both"}, "fl2va, ref2va"),
        ({"kernels": "cuda"}, "auto, triton, torch"),
        ({"device": "gpu"}, "cuda:N"),
        ({"device": "mps"}, "cuda:N"),
        ({"device": "cuda:99"}, "CUDA devices found"),
        ({"encode_precision": "tf32"}, "auto, float32, split, half"),
        ({"encode_precision": "split", "quality": "exact"}, "quality is exact"),
    ],
)
def test_impossible_setting_is_refused_with_the_choices(tmp_path, settings, words):
    with pytest.raises(RequestError, match=words):
        EngineConfig(checkpoint=tmp_path, **settings)


def test_equal_settings_are_one_key(tmp_path):
    assert EngineConfig(checkpoint=str(tmp_path)) == EngineConfig(checkpoint=tmp_path)
    assert len({EngineConfig(checkpoint=str(tmp_path)), EngineConfig(checkpoint=tmp_path)}) == 1


def test_automatic_settings_are_the_same_engine_as_the_ones_they_stand_for(tmp_path):
    named = EngineConfig(checkpoint=tmp_path, device="cpu", precision="float32")
    assert EngineConfig(checkpoint=tmp_path, device="cpu") == named
    if not torch.cuda.is_available():
        assert EngineConfig(checkpoint=tmp_path) == named


def test_precision_follows_the_device(tmp_path):
    config = EngineConfig(checkpoint=tmp_path, device="cpu")
    assert config.torch_dtype == config.vae_dtype == torch.float32


def test_weights_in_8_bits_compute_in_bfloat16(tmp_path):
    config = EngineConfig(checkpoint=tmp_path, device="cpu", precision="fp8")
    assert config.torch_dtype == torch.bfloat16
    assert config.weight_dtype == torch.float8_e4m3fn
    config = EngineConfig(checkpoint=tmp_path, device="cpu", precision="bfloat16")
    assert config.weight_dtype == config.torch_dtype == torch.bfloat16


def test_debug_override_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("H3_KERNELS", "torch")
    assert EngineConfig.from_env(checkpoint=tmp_path).kernels == "torch"
