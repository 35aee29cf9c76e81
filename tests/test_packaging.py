"""What importing and installing the pack does to a host: next to nothing."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

IMPORTS = """
import json, os, runpy, sys, threading, time
import torch
runpy.run_path(os.path.join(sys.argv[1], "_bootstrap.py"))["register"]()
files, started = set(os.listdir(".")), time.process_time()
import comfyui_h3.h3core.engine
seconds = time.process_time() - started
report = {
    "seconds": seconds,
    "cuda": torch.cuda.is_initialized(),
    "threads": threading.active_count(),
    "children": open(f"/proc/self/task/{os.getpid()}/children").read().split(),
    "files": sorted(set(os.listdir(".")) - files),
    "host_modules": sorted({"comfy", "comfy_api", "folder_paths", "nodes"} & set(sys.modules)),
}
with open(sys.argv[2], "w") as file:
    json.dump(report, file)
"""


@pytest.fixture(scope="module")
def import_run(tmp_path_factory):
    """(report, finished process) of importing the engine in a fresh interpreter."""
    folder = tmp_path_factory.mktemp("import")
    report = folder / "report.json"
    work = folder / "cwd"
    work.mkdir()
    command = [sys.executable, "-c", IMPORTS, str(ROOT), str(report)]
    process = subprocess.run(command, cwd=work, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return json.loads(report.read_text()), process


def test_engine_imports_in_half_a_second_of_cpu_on_top_of_torch(import_run):
    assert import_run[0]["seconds"] < 0.5


def test_import_prints_nothing(import_run):
    assert import_run[1].stdout == ""
    assert import_run[1].stderr == ""


def test_import_starts_nothing(import_run):
    report, _ = import_run
    assert not report["cuda"]
    assert report["threads"] == 1
    assert report["children"] == []
    assert report["files"] == []


def test_engine_needs_no_host(import_run):
    assert import_run[0]["host_modules"] == []


def test_root_package_needs_no_host_and_offers_the_entrypoint():
    code = "import comfyui_h3_copy as pack; import asyncio; assert asyncio.iscoroutinefunction(pack.comfy_entrypoint)"
    load = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('comfyui_h3_copy', {str(ROOT / '__init__.py')!r},"
        f" submodule_search_locations=[{str(ROOT)!r}])\n"
        "sys.modules['comfyui_h3_copy'] = module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
    )
    process = subprocess.run([sys.executable, "-c", load + code], capture_output=True, text=True)
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")


def test_requirements_of_the_pack_move_nothing():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    assert [line for line in lines if line.strip() and not line.startswith("#")] == []


@pytest.mark.slow
def test_tests_are_collected_from_another_folder(tmp_path):
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", str(ROOT / "tests")]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="setuptools is not installed")
def test_editable_install_gives_the_import_name_and_nothing_else(tmp_path):
    clone = tmp_path / "视频 pack v1.2"
    kept_out = shutil.ignore_patterns(".*", "out", "build", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(ROOT, clone, ignore=kept_out)
    environment = tmp_path / "env"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    (packages / "packages_of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")  # torch, setuptools

    options = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    install = [sys.executable, "-m", "pip", "--python", python, "install", *options, "--editable", clone]
    process = subprocess.run(install, cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr

    command = [python, "-m", "comfyui_h3.h3core.tiny", "--help"]
    process = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "--out" in process.stdout
    code = (
        "import sys, importlib.util as u, comfyui_h3.h3core as core; print(core.__path__[0]);"
        "sys.exit(any(u.find_spec(name) for name in ('h3core', 'nodes')))"
    )
    process = subprocess.run([python, "-c", code], cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert process.returncode == 0, "h3core or nodes became top-level modules"
    assert process.stdout.strip() == str(clone / "h3core")
