"""Who leaves the device when a stage needs room, and who stays."""

from pathlib import Path

import pytest
import torch
from torch import nn

from comfyui_h3.h3core.errors import DeviceMemoryError, H3Error
from comfyui_h3.h3core.memory_plan import FIXED_BYTES, MARGIN, MemoryPlan, Need
from comfyui_h3.h3core.residency import Residency, Source, available_host_bytes

GIB = 1 << 30


def silent(done, total):
    pass


@pytest.fixture
def residency(monkeypatch):
    """Three modules of 1 KiB on a "device" whose free memory the test sets; nothing is allocated on a GPU."""
    sources = {
        name: Source(build=lambda: nn.Linear(256, 1, bias=False), load=lambda on_load: nn.Linear(256, 1, bias=False))
        for name in ("encoder", "dit", "decoder")
    }
    free = {"bytes": 100 * GIB}
    monkeypatch.setattr(Residency, "_free_bytes", lambda self: free["bytes"])
    residency = Residency(torch.device("cuda"), sources)
    residency.free = free
    return residency


def test_modules_stay_while_there_is_room(residency):
    for name in ("encoder", "dit", "decoder"):
        residency.get(name, 0, silent)
    assert list(residency._loaded) == ["encoder", "dit", "decoder"]


def test_others_leave_when_a_new_module_needs_room(residency):
    residency.get("encoder", 0, silent)
    residency.get("dit", 0, silent)
    residency.free["bytes"] = 0
    residency.get("decoder", 0, silent)
    assert list(residency._loaded) == ["decoder"]


def test_others_leave_when_a_loaded_module_gets_a_larger_job(residency):
    """A longer clip beside an idle encoder: the encoder goes, not the job."""
    dit = residency.get("dit", 0, silent)
    residency.get("encoder", 0, silent)
    residency.free["bytes"] = 10 * GIB
    assert residency.get("dit", 5 * GIB, silent) is dit
    assert "encoder" in residency._loaded
    assert residency.get("dit", 50 * GIB, silent) is dit
    assert list(residency._loaded) == ["dit"]


def test_no_more_leave_than_must(residency, monkeypatch):
    for name in ("encoder", "decoder"):
        residency.get(name, 0, silent)
    amounts = iter([0, 100 * GIB])
    monkeypatch.setattr(Residency, "_free_bytes", lambda self: next(amounts))
    residency.get("dit", 0, silent)
    assert list(residency._loaded) == ["decoder", "dit"]


def job(*stages, leaving=()):
    needs = tuple(Need(stage=part, part=part, weight_bytes=1024, working_bytes=0) for part in stages)
    return MemoryPlan(needs=needs, leaving=frozenset(leaving))


def test_who_leaves_after_its_stage_stays_until_its_room_is_needed(residency):
    residency.follow(job("encoder", "dit", "decoder", leaving=["encoder"]))
    residency.get("encoder", 0, silent)
    residency.get("dit", 0, silent)
    assert set(residency._loaded) == {"encoder", "dit"}


def test_who_leaves_after_its_stage_leaves_first(residency, monkeypatch):
    residency.follow(job("encoder", "dit", "decoder", leaving=["encoder"]))
    for name in ("decoder", "encoder"):
        residency.get(name, 0, silent)
    amounts = iter([0, 100 * GIB])
    monkeypatch.setattr(Residency, "_free_bytes", lambda self: next(amounts))
    residency.get("dit", 0, silent)
    assert set(residency._loaded) == {"decoder", "dit"}


def test_what_the_job_does_not_use_leaves_before_all_it_does(residency, monkeypatch):
    residency.follow(job("encoder", "decoder", leaving=["encoder"]))
    for name in ("encoder", "dit"):
        residency.get(name, 0, silent)
    amounts = iter([0, 100 * GIB])
    monkeypatch.setattr(Residency, "_free_bytes", lambda self: next(amounts))
    residency.get("decoder", 0, silent)
    assert set(residency._loaded) == {"encoder", "decoder"}


def test_missing_bytes_are_those_of_the_dtype_it_will_have(residency):
    assert residency.missing_bytes("dit", GIB) == 256 * 4 + int(MARGIN * GIB) + FIXED_BYTES
    residency.get("dit", 0, silent)
    assert residency.missing_bytes("dit", GIB) == int(MARGIN * GIB) + FIXED_BYTES


def test_capacity_is_what_is_free_and_what_its_modules_take(residency):
    residency.get("dit", 0, silent)
    residency.free["bytes"] = 5 * GIB
    assert residency.capacity_bytes() == 5 * GIB + 256 * 4


def test_nobody_counts_the_memory_of_a_cpu():
    assert Residency(torch.device("cpu"), {}).capacity_bytes() is None


@pytest.mark.skipif(not Path("/proc/meminfo").is_file(), reason="this system does not tell its memory in /proc")
def test_available_memory_is_what_the_kernel_says():
    available = available_host_bytes()
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    assert 0 < available <= int(lines["MemTotal"].split()[0]) << 10


def test_memory_error_is_a_users_error_and_pytorchs_own():
    """Hosts free their models when they see PyTorch's error."""
    assert issubclass(DeviceMemoryError, H3Error)
    assert issubclass(DeviceMemoryError, torch.OutOfMemoryError)
