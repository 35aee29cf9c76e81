import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from comfyui_h3.benchmarks.record import write_record

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a CUDA device")
def test_ops_refuses_to_time_the_interpreter(tmp_path):
    command = [sys.executable, "_bootstrap.py", "benchmarks.ops", "--op", "swiglu", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "no CUDA device" in done.stderr
    assert not list(tmp_path.iterdir())


def test_record_holds_figures_and_what_they_were_measured_with(tmp_path):
    path = write_record(
        "ops", {"swiglu.triton_us": 1.23456}, {"F": 8}, device=torch.device("cpu"), out=tmp_path, commit="abc"
    )
    record = json.loads(path.read_text())
    assert set(record) == {"name", "device", "commit", "versions", "shapes", "figures"}
    assert record["figures"] == {"swiglu.triton_us": 1.2346}
    assert record["shapes"] == {"F": 8}
    assert record["commit"] == "abc"
    assert record["versions"]["torch"] == torch.__version__


def test_record_refuses_a_figure_without_a_group(tmp_path):
    with pytest.raises(ValueError, match="not named group"):
        write_record("ops", {"triton_us": 1.0}, {}, device=torch.device("cpu"), out=tmp_path)
