import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from comfyui_h3.benchmarks import summary
from comfyui_h3.benchmarks.full_size import full_size_checkpoints
from comfyui_h3.benchmarks.record import RESULTS, write_record

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


def test_readme_and_summary_are_those_of_the_results():
    results = summary.Results.read(RESULTS, "h200")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert summary.with_tables(readme, results) == readme, "run benchmarks.summary"
    assert json.loads((RESULTS / "h200_pipeline.json").read_text()) == results.pipeline(), "run benchmarks.summary"


def test_summary_leaves_out_what_was_not_measured(tmp_path):
    write_record("peers", {"5s.ours_s": 5.25}, {}, device=torch.device("cpu"), out=tmp_path, commit="abc")
    slug = next(tmp_path.iterdir()).stem.removesuffix("_peers")
    results = summary.Results.read(tmp_path, slug)
    assert results.pipeline()["figures"] == {"forward_5s.lossless_s": 5.25, "forward_5s.exact_s": 5.25}
    assert "| ComfyUI-H3 | 5.25 s | not measured |" in summary.tables(results)


def test_full_size_has_the_released_sizes(tmp_path):
    checkpoint = full_size_checkpoints(tmp_path).first
    assert checkpoint.transformer.num_bytes + checkpoint.modulator.num_bytes == 66_280_430_144
    assert checkpoint.text_encoder.num_bytes == 51_506_191_840
    video = checkpoint.video_encoder.num_bytes + checkpoint.video_decoder.num_bytes
    assert video == 4 * 2_603_871_032
