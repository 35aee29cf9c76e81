"""The choice of an attention."""

import pytest
import torch

from comfyui_h3.h3core.accel import attention as module
from comfyui_h3.h3core.accel.attention import ATTENTIONS, choose_attention
from comfyui_h3.h3core.config import EngineConfig
from comfyui_h3.h3core.engine import Engine
from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.models.dit.attention import sdpa
from comfyui_h3.tests.tolerances import BF16_ATTENTION, FP8_ATTENTION, relative_error

CPU = torch.device("cpu")
GPU = torch.device("cuda:0")  # only ever named: what would touch it is replaced


@pytest.fixture
def on(monkeypatch):
    """Makes believe in a GPU of a compute capability, whose trials are arithmetic on the CPU."""

    def make(capability, **attends):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        tried = module._try
        monkeypatch.setattr(module, "_try", lambda attend, device, *rest: tried(attend, CPU, *rest))
        loaders = dict.fromkeys(module._LOADERS, missing) | {
            name: lambda device, attend=attend: attend for name, attend in attends.items()
        }
        monkeypatch.setattr(module, "_LOADERS", loaders)

    return make


def missing(device):
    raise module.Missing("the package is not installed")


def right(q, k, v):
    return sdpa(q, k, v)


def wrong(q, k, v):
    return sdpa(q, k, v).roll(1, 0)


def misshapen(q, k, v):
    return sdpa(q, k, v)[None]


def out_of_memory(q, k, v):
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_memory_that_others_hold_says_nothing_about_an_attention(on):
    on((9, 0), fa3=out_of_memory, cudnn=right)
    with pytest.raises(torch.OutOfMemoryError):
        choose_attention("auto", GPU, torch.bfloat16, 64)


def broken(q, k, v):
    raise RuntimeError("no kernel image is available for execution on the device")


@pytest.mark.parametrize(
    ("capability", "installed", "expected"),
    [
        ((9, 0), ("fa3", "cudnn", "flash"), "fa3"),
        ((9, 0), ("fa2", "cudnn", "flash"), "cudnn"),
        ((9, 0), ("flash",), "flash"),
        ((10, 0), ("fa4", "fa3", "cudnn"), "fa4"),
        ((10, 3), ("fa3", "cudnn"), "cudnn"),
        ((8, 9), ("fa2", "flash"), "fa2"),
        ((8, 6), ("cudnn", "flash"), "flash"),
        ((8, 0), (), "sdpa"),
        ((12, 1), ("fa2", "fa3", "fa4", "cudnn", "flash"), "sdpa"),  # GB10
        ((7, 5), ("flash",), "sdpa"),
    ],
)
def test_auto_takes_the_best_that_the_gpu_has(on, capability, installed, expected):
    on(capability, **dict.fromkeys(installed, right))
    assert choose_attention("auto", GPU, torch.bfloat16, 64).name == expected


@pytest.mark.parametrize(
    ("attend", "words"),
    [(wrong, "results are wrong"), (broken, "no kernel image"), (misshapen, "its result is")],
)
def test_package_that_does_not_work_here_is_passed_over(on, attend, words, caplog):
    on((9, 0), fa3=attend, cudnn=right)
    chosen = choose_attention("auto", GPU, torch.bfloat16, 64)
    assert chosen.name == "cudnn"
    assert words in chosen.reason
    assert words in caplog.text  # a slower one runs in its place: that is a warning
    with pytest.raises(RequestError, match=f"attention=fa3 cannot run: .*{words}.*use attention=auto"):
        choose_attention("fa3", GPU, torch.bfloat16, 64)


def test_float32_runs_the_attention_of_pytorch(on):
    on((9, 0), fa3=right, cudnn=right)
    chosen = choose_attention("auto", GPU, torch.float32, 64)
    assert chosen.name == "sdpa"
    assert "the precision is float32" in chosen.reason


@pytest.mark.gpu
def test_what_is_chosen_on_this_gpu_is_right(device):
    for name in ATTENTIONS:
        try:
            chosen = choose_attention(name, device, torch.bfloat16, 128)
        except RequestError:
            assert name not in ("auto", "sdpa")
            continue
        q, k, v = torch.randn(3, 777, 4, 128, device=device, dtype=torch.bfloat16).unbind(0)
        if name == "fa3_fp8":  # quantises what its own norm bounds
            weight, none = torch.ones(128, device=device, dtype=torch.bfloat16), q.new_empty(len(q), 0)
            v = v + 10  # what all values share is kept apart
            normed = torch.nn.functional.rms_norm(torch.stack((q, k)), (128,))
            expected = sdpa(*normed.float(), v.float())
            out = chosen.attend(*chosen.attend.norm_rope(q, k, weight, weight, none, none, 1e-5), v)
            assert relative_error(out - 10, expected - 10) < FP8_ATTENTION
        else:
            expected = sdpa(q.float(), k.float(), v.float())
            assert relative_error(chosen.attend(q, k, v), expected) < BF16_ATTENTION


def test_cpu_runs_the_attention_of_pytorch():
    chosen = choose_attention("auto", CPU, torch.bfloat16, 128)
    assert (chosen.name, chosen.attend) == ("sdpa", sdpa)
    assert "cpu" in chosen.reason


def test_attention_that_cannot_run_is_refused_when_it_is_asked_for(tiny_h3):
    with pytest.raises(RequestError, match="attention=fa3 cannot run: the device is cpu"):
        Engine(EngineConfig(checkpoint=tiny_h3, device="cpu", attention="fa3"))
    with pytest.raises(RequestError, match="auto, fa3, fa4, fa2, cudnn, flash, sdpa, fa3_fp8"):
        EngineConfig(checkpoint=tiny_h3, device="cpu", attention="sage")


def test_choice_is_logged_and_shown(tiny_h3, caplog):
    caplog.set_level("INFO")
    engine = Engine(EngineConfig(checkpoint=tiny_h3, device="cpu"))
    assert "attention: sdpa, as the device is cpu" in caplog.text
    assert "attention sdpa" in engine.describe()
