"""The choice of an attention."""

import pytest
import torch

from comfyui_h3.h3core.accel.attention import choose_attention
from comfyui_h3.h3core.config import EngineConfig
from comfyui_h3.h3core.engine import Engine
from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.models.dit.attention import sdpa

CPU = torch.device("cpu")


def test_cpu_runs_the_attention_of_pytorch():
    chosen = choose_attention("auto", CPU, torch.bfloat16, 128)
    assert (chosen.name, chosen.attend) == ("sdpa", sdpa)
    assert "cpu" in chosen.reason


def test_attention_that_cannot_run_is_refused_when_it_is_asked_for(tiny_h3):
    with pytest.raises(RequestError, match="attention=fa3 cannot run: the device is cpu"):
        Engine(EngineConfig(checkpoint=tiny_h3, device="cpu", attention="fa3"))
    with pytest.raises(RequestError, match="auto, fa3, sdpa"):
        EngineConfig(checkpoint=tiny_h3, device="cpu", attention="sage")


def test_choice_is_logged_and_shown(tiny_h3, caplog):
    caplog.set_level("INFO")
    engine = Engine(EngineConfig(checkpoint=tiny_h3, device="cpu"))
    assert "attention: sdpa, as the device is cpu" in caplog.text
    assert "attention sdpa" in engine.describe()
