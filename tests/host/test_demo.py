"""``make demo`` as a user runs it: exit code, file, table, errors, and no server left behind."""

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import av
import pytest

from comfyui_h3.scripts.terminal import StageLines, table
from comfyui_h3.tests.host.conftest import ROOT

QUICK = {"WIDTH": "64", "HEIGHT": "64", "FRAMES": "22", "SIGMA_POINTS": "4", "PROMPT": "a cat plays the piano"}


@pytest.fixture
def start_demo(host_dir, tmp_path):
    """``start_demo(WIDTH=...)``: the demo's process, with its output in ``tmp_path / "out"``."""
    started = []

    def start(**settings):
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in ("MODEL", "SEED", "TRITON_INTERPRET", "WORKFLOW")
        }
        env = {**kept, "COMFYUI_PATH": str(host_dir), "OUT": str(tmp_path / "out"), **QUICK, **settings}
        command = [sys.executable, str(ROOT / "_bootstrap.py"), "scripts.demo"]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True}
        process = subprocess.Popen(command, cwd=tmp_path, env=env, **options)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_demo_saves_a_video_and_prints_the_stage_times(start_demo, tmp_path):
    process = start_demo()
    stdout, stderr = process.communicate(timeout=180)
    assert process.returncode == 0, stderr
    (path,) = (tmp_path / "out").iterdir()
    with av.open(str(path)) as file:
        assert (file.streams.video[0].width, file.streams.audio[0].rate) == (64, 32000)
    assert re.search(r"^H3 Sample DiT .* 3/3$", stdout, re.MULTILINE)
    assert re.search(r"^sample +\d+\.\d\d +3$", stdout, re.MULTILINE)
    assert path.name in stdout.splitlines()[-1]


def test_demo_runs_a_workflow_with_media(start_demo, tmp_path):
    process = start_demo(WORKFLOW="ref2va", PROMPT="<Picture 1> walks through <Video 1>")
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert re.search(r"^encode_media +\d+\.\d\d +3$", stdout, re.MULTILINE)
    assert len(list((tmp_path / "out").iterdir())) == 1


def test_demo_shows_what_is_unusual_about_a_request(start_demo):
    process = start_demo(FRAMES="20", SIGMA_POINTS="2")
    stdout, stderr = process.communicate(timeout=180)
    assert process.returncode == 0, stderr
    assert "notice: frames=20 is not 17k + 5: rounded up to 22 (0.92 s)" in stdout


def test_demo_names_the_workflows_there_are(start_demo):
    process = start_demo(WORKFLOW="t2v")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "WORKFLOW=t2v does not exist; use one of first_frame, fl2va, ref2va, t2va" in stderr


def test_demo_says_what_to_do_about_an_impossible_size(start_demo, tmp_path):
    process = start_demo(WIDTH="33")
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == 1
    first, second = stderr.splitlines()[-2:]
    assert "32 or 64" in first
    log = Path(second.removeprefix("log: "))
    assert log.is_file()
    shutil.rmtree(log.parent)
    assert not list((tmp_path / "out").iterdir())


def test_demo_refuses_an_output_folder_that_cannot_be_before_it_starts_anything(start_demo, tmp_path):
    (tmp_path / "taken").write_text("a file")
    process = start_demo(OUT=str(tmp_path / "taken" / "out"))
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "cannot be used as a folder" in stderr
    assert not stdout


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_killed_demo_leaves_no_server(start_demo):
    process = start_demo(SIGMA_POINTS="200", WIDTH="256", HEIGHT="256")
    next(line for line in process.stdout if line.startswith("ready at"))
    (server,) = children(process.pid)
    process.kill()
    process.wait(30)
    deadline = time.monotonic() + 15
    while Path(f"/proc/{server}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{server}").exists()


@pytest.mark.parametrize("name", ["WIDTH", "SEED", "MODEL"])
def test_demo_refuses_a_setting_that_cannot_be_read(start_demo, name):
    process = start_demo(**{name: "nonsense"})
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert stderr.startswith(f"{name}=nonsense")


def test_interrupted_demo_leaves_no_server(start_demo):
    process = start_demo(SIGMA_POINTS="200", WIDTH="256", HEIGHT="256")
    for line in process.stdout:
        if line.startswith("ready"):
            break
    (server,) = children(process.pid)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 128 + signal.SIGINT
    assert not Path(f"/proc/{server}").exists()


def test_stage_line_on_a_terminal_is_redrawn_without_leftovers():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    lines = StageLines(stream := Terminal())
    lines.begin("sample")
    lines.step(20_000, 20_000)
    lines.step(3, 3)
    lines.end()
    drawn = stream.getvalue().split("\r")[1:]
    assert drawn[-1].endswith("\n")
    assert "100 %" in drawn[1]
    assert len(drawn[2]) == len(drawn[1])


def test_table_aligns_its_columns():
    assert table(("stage", "seconds"), [("sample", "1.25"), ("save", "10.50")]).splitlines() == [
        "stage   seconds",
        "------  -------",
        "sample     1.25",
        "save      10.50",
    ]
