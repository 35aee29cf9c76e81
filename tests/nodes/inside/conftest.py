"""Puts the host named by H3_TEST_HOST on the path of this process, on the CPU and with its files in a temporary folder.

H3_TEST_HOST=/path/of/ComfyUI pytest -o python_files="inside_*.py" tests/nodes/inside
"""

import importlib
import os
import sys

import pytest

HOST = os.environ.get("H3_TEST_HOST")
if HOST:  # else no file here is collected: none is called test_*.py
    sys.path.insert(0, HOST)  # as when it runs: several of its modules have common names
    from comfy.cli_args import args

    args.cpu = True  # before anything asks for a device
    importlib.import_module("utils.install_util")  # the host's nodes.py puts a folder with another utils in front


@pytest.fixture(autouse=True)
def host_folders(tmp_path_factory, monkeypatch):
    """(models, output): the folders the host uses during one test."""
    import folder_paths

    models, output = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("output")
    monkeypatch.setattr(folder_paths, "models_dir", str(models))
    others = {key: paths for key, paths in folder_paths.folder_names_and_paths.items() if key != "minimax_h3"}
    monkeypatch.setattr(folder_paths, "folder_names_and_paths", others)
    monkeypatch.setattr(folder_paths, "output_directory", str(output))
    return models, output


@pytest.fixture
def shown(monkeypatch):
    """Lines that nodes put on themselves."""
    lines = []
    for module in ("encode_media", "references", "canvas", "load", "lora", "progress"):
        monkeypatch.setattr(f"comfyui_h3.nodes.{module}.show_text", lines.append)
    return lines
