"""Weights of the tiny transformer as the engine has them, with LoRAs and without."""

import functools

import pytest
import torch

from comfyui_h3.h3core.checkpoint.official import Checkpoint
from comfyui_h3.h3core.lora.stack import with_loras


def read_weights(checkpoint, dtype=torch.float32):
    """Every parameter of the transformer and of its modulator, by name."""
    tensors = dict(checkpoint.load_dit(torch.device("cpu"), dtype).state_dict())
    modulator = checkpoint.modulator.fill(checkpoint.new_modulator(dtype), torch.device("cpu"), None)
    return tensors | dict(modulator.state_dict())


def merged_weights(checkpoint, *loras, dtype=torch.float32):
    """The same with LoRAs, (path, strength) each, and their reports."""
    merged, reports = with_loras({"fl2va": checkpoint}, loras)
    return read_weights(merged["fl2va"], dtype), reports


@pytest.fixture(scope="session")
def checkpoint(tiny_h3):
    return Checkpoint.open(tiny_h3, "fl2va")


@pytest.fixture(scope="session")
def base(checkpoint):
    """Weights without a LoRA, float32."""
    return read_weights(checkpoint)


@pytest.fixture
def merge(checkpoint):
    """``merge(*(path, strength), dtype)``: merged weights, and the reports."""

    return functools.partial(merged_weights, checkpoint)
