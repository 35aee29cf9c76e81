"""Makes ``comfyui_h3`` importable, and picks the device that tests run on."""

import runpy
from pathlib import Path

import pytest

runpy.run_path(str(Path(__file__).parents[1] / "_bootstrap.py"))["register"]()


@pytest.fixture(scope="session")
def device():
    """The CUDA device where there is one, else the CPU."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
