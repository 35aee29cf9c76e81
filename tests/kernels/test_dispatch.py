import logging
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

from comfyui_h3.kernels import dispatch
from comfyui_h3.kernels.dispatch import BackendError, backend, current_backend
from comfyui_h3.kernels.gate_residual import gate_residual
from comfyui_h3.kernels.launch import Launch, pick
from comfyui_h3.kernels.swiglu import swiglu

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _fresh_state(monkeypatch):
    monkeypatch.setattr(dispatch, "_logged", set())


@pytest.fixture
def gate_up(device, generator):
    return torch.randn(4, 64, device=device, generator=generator).bfloat16()


def run_python(code, **env):
    """Run ``code`` in a fresh interpreter with the pack registered and without Triton's interpreter."""
    prelude = "import runpy, sys\nrunpy.run_path('_bootstrap.py')['register']()\n"
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | env
    done = subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(code)],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


class TestForcedTriton:
    pytestmark = pytest.mark.triton

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda x: x.float(), "gate_up is float32, not bfloat16"),
            (lambda x: x[:, ::2], "gate_up is strided in its last dimension"),
            (lambda x: x.clone().requires_grad_(), "gate_up requires a gradient"),
        ],
    )
    def test_refuses_what_the_kernel_cannot_read(self, gate_up, change, reason):
        with backend("triton"), pytest.raises(BackendError, match=f"swiglu: .*{reason}.* use 'auto' or 'torch'"):
            swiglu(change(gate_up))

    def test_refuses_a_float_index(self, gate_up):
        with backend("triton"), pytest.raises(BackendError, match="index is float32"):
            gate_residual(gate_up, gate_up, gate_up, torch.zeros(4, device=gate_up.device))

    def test_refuses_a_strided_index(self, gate_up):
        index = torch.zeros(8, device=gate_up.device, dtype=torch.int32)[::2]
        with backend("triton"), pytest.raises(BackendError, match="index is strided"):
            gate_residual(gate_up, gate_up, gate_up, index)

    def test_takes_parameters_where_no_gradient_is_recorded(self, gate_up):
        parameter = torch.nn.Parameter(gate_up)
        with backend("triton"), torch.no_grad():
            out = swiglu(parameter.clone())
            assert torch.equal(out, swiglu(gate_up))

    def test_runs_under_inference_mode(self, gate_up):
        with backend("triton"), torch.inference_mode():
            out = swiglu(gate_up.clone())
        assert torch.equal(out, swiglu(gate_up))


def test_forced_triton_refuses_a_cpu_without_the_interpreter():
    out = run_python("""
        import torch
        from comfyui_h3.kernels.dispatch import BackendError, backend
        from comfyui_h3.kernels.swiglu import swiglu
        try:
            with backend("triton"):
                swiglu(torch.zeros(1, 2, dtype=torch.bfloat16))
        except BackendError as error:
            print(error)
    """)
    assert "swiglu: backend 'triton' is set, but" in out
    assert "cpu" in out or "triton cannot be imported" in out


def test_runs_on_torch_where_triton_cannot_be_imported():
    out = run_python("""
        sys.modules["triton"] = None
        import importlib
        import pkgutil
        import torch
        from comfyui_h3 import kernels
        for module in pkgutil.iter_modules(kernels.__path__):
            importlib.import_module(f"comfyui_h3.kernels.{module.name}")
        from comfyui_h3.kernels.dispatch import BackendError, backend
        from comfyui_h3.kernels.gate_residual import gate_residual
        from comfyui_h3.kernels.norm_modulate import norm_modulate
        from comfyui_h3.kernels.qk_norm_rope import qk_norm_rope
        from comfyui_h3.kernels.swiglu import swiglu
        x = torch.ones(2, 4, dtype=torch.bfloat16)
        index = torch.zeros(2, dtype=torch.int32)
        print(gate_residual(x, x, x, index).tolist())
        print(norm_modulate(x, x[0], x, x, index, 0.0).tolist())
        print(swiglu(torch.tensor([[0.0, 5.0]])).tolist())
        q, k = qk_norm_rope(x[:, None], x[:, None], x[0], x[0], x[:, :1], 0 * x[:, :1], 0.0)
        print(q.tolist() == k.tolist() == x[:, None].tolist())
        try:
            with backend("triton"):
                swiglu(x)
        except BackendError as error:
            print(error)
    """)
    gated, modulated, activated, rotated, refusal = out.splitlines()
    assert gated == str([[2.0] * 4] * 2)
    assert modulated == str([[3.0] * 4] * 2)
    assert activated == "[[0.0]]"
    assert rotated == "True"
    assert "triton cannot be imported" in refusal


class TestLog:
    def test_names_the_reason_once(self, gate_up, caplog):
        with caplog.at_level(logging.INFO, dispatch.__name__):
            for _ in range(3):
                swiglu(gate_up.float())
        assert len(caplog.records) == 1
        assert "swiglu runs on torch" in caplog.text

    def test_says_a_new_reason(self, gate_up, caplog):
        with caplog.at_level(logging.INFO, dispatch.__name__):
            swiglu(gate_up.float())
            with backend("torch"):
                swiglu(gate_up.float())
        assert len(caplog.records) == 2
        assert "this backend is set" in caplog.messages[1]

    @pytest.mark.gpu
    def test_warns_on_a_gpu_that_takes_the_slower_path(self, gate_up, caplog):
        swiglu(gate_up.float())
        assert caplog.records[0].levelno == logging.WARNING
        assert "gate_up is float32" in caplog.text

    @pytest.mark.gpu
    @pytest.mark.triton
    def test_auto_takes_triton_on_a_gpu(self, gate_up, caplog):
        with caplog.at_level(logging.INFO, dispatch.__name__):
            swiglu(gate_up)
        assert caplog.messages == ["swiglu runs on triton"]


class TestBackend:
    def test_override_ends_with_its_block_and_at_its_thread(self):
        with backend("torch"):
            assert current_backend() == "torch"
            assert in_thread(current_backend) == "auto"
        assert current_backend() == "auto"

    def test_override_ends_with_an_error(self):
        with pytest.raises(KeyError), backend("torch"):
            raise KeyError
        assert current_backend() == "auto"

    def test_refuses_an_unknown_name(self):
        with pytest.raises(ValueError, match="'cuda' does not exist; use one of auto, triton, torch"), backend("cuda"):
            pass


def in_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_pick_takes_the_entry_of_any_other_device_off_cuda():
    table = {(9, 0): Launch(block=1, num_warps=1), None: Launch(block=2, num_warps=2)}
    assert pick(table, torch.device("cpu")) is table[None]


@pytest.mark.gpu
def test_pick_takes_the_entry_of_the_compute_capability(device):
    own = Launch(block=1, num_warps=1)
    table = {torch.cuda.get_device_capability(device): own, None: Launch(block=2, num_warps=2)}
    assert pick(table, device) is own


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_runs_on_the_device_of_its_tensors():
    x = torch.randn(64, 256, device="cuda:1").bfloat16()
    assert torch.cuda.current_device() == 0
    with backend("triton"):
        out = swiglu(x)
    with backend("torch"):
        assert torch.equal(out, swiglu(x))
    assert torch.cuda.current_device() == 0
