"""Modulation tables from a checkpoint: read layer by layer, equal to the projections with all weights there."""

import itertools
import os

import pytest
import torch

from comfyui_h3.h3core.checkpoint.official import Checkpoint
from comfyui_h3.h3core.errors import CheckpointError

CPU = torch.device("cpu")
STEPS = (torch.tensor([0.0]), torch.tensor([0.25, 0.6]), torch.tensor([0.3, 0.7, 0.999]))


@pytest.fixture
def checkpoint(tiny_h3):
    return Checkpoint.open(tiny_h3, "fl2va")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_are_those_of_the_whole_module(checkpoint, dtype):
    modulator = checkpoint.modulator.fill(checkpoint.new_modulator(dtype), CPU, None)
    resident, streamed = modulator(STEPS), checkpoint.read_modulation(STEPS, CPU, dtype)
    config = checkpoint.dit_config
    assert streamed.blocks.shape == (config.num_layers, 3 * 6, 6, config.hidden_size)
    assert streamed.final.shape == (6, 2, config.hidden_size)
    assert streamed.blocks.dtype == streamed.final.dtype == dtype
    assert torch.equal(streamed.blocks, resident.blocks)
    assert torch.equal(streamed.final, resident.final)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_group_is_projected_as_if_it_were_alone(checkpoint, dtype):
    """The order of a matrix product's sums depends on its number of rows; the reference projects step by step."""
    together = checkpoint.read_modulation(STEPS, CPU, dtype)
    start = 0
    for timesteps in STEPS:
        alone = checkpoint.read_modulation([timesteps], CPU, dtype)
        stop = start + len(timesteps)
        assert torch.equal(together.blocks[:, 3 * start : 3 * stop], alone.blocks)
        assert torch.equal(together.final[start:stop], alone.final)
        start = stop


def test_tables_of_a_block_come_in_the_order_of_the_projection(checkpoint):
    modulation = checkpoint.read_modulation(STEPS, CPU, torch.float32)
    table = modulation.of_block(2)
    names = ("shift1", "scale1", "gate1", "shift2", "scale2", "gate2")
    for number, name in enumerate(names):
        assert torch.equal(getattr(table, name), modulation.blocks[2, :, number])


def test_no_more_than_a_layer_is_held_at_a_time(checkpoint):
    modulator = checkpoint.new_modulator(torch.bfloat16)
    resident = checkpoint.modulator.stream(modulator, CPU, None)
    for prefix in ("time_embedder.", "blocks.1.", "final_layer."):
        with resident(prefix):
            here = {name for name, tensor in modulator.state_dict().items() if tensor.device.type == "cpu"}
            assert here == {name for name in modulator.state_dict() if name.startswith(prefix)}
        assert all(tensor.device.type == "meta" for tensor in modulator.state_dict().values())


def test_progress_counts_all_bytes_once(checkpoint):
    reports = []
    checkpoint.read_modulation(STEPS, CPU, torch.float32, lambda done, total: reports.append((done, total)))
    assert reports[0] == (0, checkpoint.modulator.num_bytes)
    assert reports[-1] == (checkpoint.modulator.num_bytes, checkpoint.modulator.num_bytes)
    assert all(a[0] < b[0] for a, b in itertools.pairwise(reports))


def test_a_cancel_in_between_leaves_no_weights(checkpoint):
    class Cancelled(Exception):
        pass

    def cancel(done, total):
        if done > total // 2:
            raise Cancelled

    modulator = checkpoint.new_modulator(torch.bfloat16)
    resident = checkpoint.modulator.stream(modulator, CPU, cancel)
    with pytest.raises(Cancelled):
        modulator(STEPS, resident)
    assert all(tensor.device.type == "meta" for tensor in modulator.state_dict().values())


def test_a_file_that_changes_in_between_is_refused(checkpoint):
    file = checkpoint.modulator.entries["blocks.0.adaln_proj.linear.weight"].file
    before = file.stat()
    try:
        file.touch()
        with pytest.raises(CheckpointError, match="was changed"):
            checkpoint.read_modulation(STEPS, CPU, torch.float32)
    finally:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
