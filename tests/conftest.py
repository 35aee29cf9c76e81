"""Makes ``comfyui_h3`` importable, picks the device tests run on, and writes the tiny H3 once a session.

Kernel tests run on a GPU, or in Triton's interpreter where there is none.
"""

import os
import runpy
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported, which diffusers does, too

runpy.run_path(str(Path(__file__).parents[1] / "_bootstrap.py"))["register"]()


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    if item.get_closest_marker("triton"):
        pytest.importorskip("triton")
    if item.get_closest_marker("oracle"):
        pytest.importorskip("diffusers")


@pytest.fixture(scope="session")
def device():
    """The CUDA device where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def tiny_h3(tmp_path_factory) -> Path:
    """A tiny H3 in the official layout. Read only: a test that damages it works on a copy."""
    from comfyui_h3.h3core.tiny.write import write_official

    folder = tmp_path_factory.mktemp("checkpoints") / "tiny-h3"
    write_official(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_engine(tiny_h3):
    """An engine in float32 on the CPU over the tiny H3."""
    from comfyui_h3.h3core.config import EngineConfig
    from comfyui_h3.h3core.engine import Engine

    return Engine(EngineConfig(checkpoint=tiny_h3, device="cpu", precision="float32"))


@pytest.fixture(scope="session")
def official_data() -> Path:
    """Config files and vocabulary of the released checkpoint (FL2VA/, Ref2VA/), which are not part of this project."""
    folder = Path(os.environ.get("H3_OFFICIAL_DATA") or Path(__file__).parents[2] / "shared" / "data" / "official")
    if not folder.is_dir():
        pytest.skip("set H3_OFFICIAL_DATA to a folder with the config files of the released checkpoint")
    return folder
