"""What ``exact_fp32`` sets, and that it leaves the host's settings as they were."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from comfyui_h3.h3core.models.precision import exact_fp32

BOOTSTRAP = Path(__file__).parents[3] / "_bootstrap.py"

PROGRAM = """
import runpy, sys, torch
runpy.run_path(sys.argv[1])["register"]()
from comfyui_h3.h3core.models.precision import exact_fp32
matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
exec(sys.argv[2])
before = matmul.fp32_precision, conv.fp32_precision
with exact_fp32():
    assert (matmul.fp32_precision, conv.fp32_precision) == ("ieee", "ieee")
    assert matmul.allow_tf32 is False  # raises where the two interfaces disagree, as a matrix product on a GPU does
assert (matmul.fp32_precision, conv.fp32_precision) == before
"""


def state():
    cudnn = torch.backends.cudnn
    return cudnn.enabled, cudnn.benchmark, cudnn.deterministic, torch.backends.cuda.matmul.allow_tf32


def test_settings_are_those_of_the_host_after_an_error():
    before = state()
    inside = []

    def fail():
        with exact_fp32(cudnn=False):
            inside.append(state())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert inside == [(False, False, True, False)]
    assert state() == before


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="this torch has one interface")
@pytest.mark.parametrize(
    "host",
    [
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.set_float32_matmul_precision('high')",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.fp32_precision = 'tf32'",
        "torch.backends.cudnn.allow_tf32 = False",
    ],
)
def test_a_host_may_use_either_interface_of_torch(host):
    # In a process of its own: torch remembers which interface was used.
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(BOOTSTRAP), host], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
