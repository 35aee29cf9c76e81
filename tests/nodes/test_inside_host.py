"""Runs the tests of tests/nodes/inside: they import the host's own modules, so they get a process of their own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FETCHED = ROOT / ".cache" / "host" / "ComfyUI"
HOSTS = ["fetched", *(["COMFYUI_PATH"] if os.environ.get("COMFYUI_PATH") else [])]


@pytest.mark.host
@pytest.mark.parametrize("name", HOSTS)
def test_nodes_inside_a_host(name, tmp_path):
    missing = [module for module in ("torchvision", "aiohttp") if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"this Python has no {', '.join(missing)}, which ComfyUI needs: use the environment of make env")
    host = FETCHED if name == "fetched" else Path(os.environ["COMFYUI_PATH"])
    if not (host / "main.py").is_file():
        pytest.skip(f"no ComfyUI in {host}: run scripts/fetch_comfy_host.sh .cache/host")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "tests/nodes/inside")]
    command += ["-o", "python_files=inside_*.py", "--basetemp", str(tmp_path / "inside")]
    env = {**os.environ, "H3_TEST_HOST": str(host), "TRITON_INTERPRET": "0"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
