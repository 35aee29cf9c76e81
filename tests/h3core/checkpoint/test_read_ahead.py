"""Reading with several threads gives what the format's own library gives, ends when it is told to, and holds little."""

import gc
import itertools
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from comfyui_h3.benchmarks import load as load_benchmark
from comfyui_h3.h3core.checkpoint import keymap, loader, read_ahead
from comfyui_h3.h3core.checkpoint.index import TensorEntry, file_stamp, read_header
from comfyui_h3.h3core.checkpoint.keymap import KeyMap
from comfyui_h3.h3core.checkpoint.loader import Reader
from comfyui_h3.h3core.checkpoint.official import Checkpoint
from comfyui_h3.h3core.errors import CheckpointError

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float16, torch.int64)


@pytest.fixture(params=["host", "device"])
def through(request, monkeypatch):
    """Both ways to memory: straight into the tensor, and by the buffers that are for a device."""
    if request.param == "device":
        monkeypatch.setattr(read_ahead, "_OnHost", lambda: read_ahead._OnDevice(CPU))


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces so small that tiny files have many, also inside one number."""
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", 1001)
    monkeypatch.setattr(read_ahead, "NUM_AHEAD", 3)


@pytest.fixture
def filled_with_nan():
    """What is allocated and not written is NaN, or the largest number of an integer type."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def write(folder, num_files=3, num_tensors=40):
    """Files of tensors of all sizes and dtypes, also without elements or dimensions; entries of them all."""
    g = torch.Generator().manual_seed(0)
    entries = {}
    for index in range(num_files):
        tensors = {f"{index}.scalar": torch.tensor(3.0 + index), f"{index}.none": torch.empty(4, 0)}
        for number in range(num_tensors):
            shape = torch.randint(1, 20, (number % 3 + 1,), generator=g).tolist()
            values = torch.randint(-100, 100, shape, generator=g)
            tensors[f"{index}.t{number}"] = values.to(DTYPES[number % len(DTYPES)])
        save_file(tensors, folder / f"{index}.safetensors")
        entries |= read_header(folder / f"{index}.safetensors")
    return entries


def reader(entries, on_load=None, keys=None):
    return Reader(entries=entries, keymap=keys or KeyMap(), device=CPU, on_load=on_load)


def as_stored(entries):
    return {name: entry.dtype for name, entry in entries.items()}


def wanted(entries):
    tensors = {}
    for file in {entry.file for entry in entries.values()}:
        tensors |= load_file(file)
    return tensors


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("h3-read")]


def test_tensors_are_those_of_the_library(tmp_path, through, small_pieces, filled_with_nan):
    entries = write(tmp_path)
    tensors = dict(reader(entries)(entries, as_stored(entries)))
    library = wanted(entries)
    assert tensors.keys() == library.keys()
    for name, tensor in library.items():
        assert tensors[name].dtype == tensor.dtype
        assert tensors[name].is_contiguous()
        assert torch.equal(tensors[name], tensor), name


def test_thousands_of_small_tensors(tmp_path, through):
    save_file({f"t{index}": torch.full((3,), index) for index in range(5000)}, tmp_path / "x.safetensors")
    entries = read_header(tmp_path / "x.safetensors")
    for name, tensor in reader(entries)(entries, as_stored(entries)):
        assert tensor.tolist() == [int(name[1:])] * 3


def test_tensors_larger_than_all_buffers(tmp_path, through, monkeypatch):
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", 1 << 20)
    num = read_ahead.PIECE_BYTES * (read_ahead.NUM_AHEAD + 2) // 8 + 3
    save_file({"a": torch.arange(num), "b": torch.arange(7)}, tmp_path / "x.safetensors")
    entries = read_header(tmp_path / "x.safetensors")
    tensors = dict(reader(entries)(entries, as_stored(entries)))
    assert torch.equal(tensors["a"], torch.arange(num))
    assert torch.equal(tensors["b"], torch.arange(7))


def test_order_is_that_of_files_and_bytes_each_time(tmp_path, through, small_pieces):
    entries = write(tmp_path)
    names = sorted(entries, key=lambda name: name[::-1])
    orders = [[name for name, _ in reader(entries)(names, as_stored(entries))] for _ in range(3)]
    files = list(dict.fromkeys(entries[name].file for name in names))
    assert orders[0] == orders[1] == orders[2]
    places = [(files.index(entries[name].file), entries[name].offset) for name in orders[0]]
    assert places == sorted(places)
    assert sorted(orders[0]) == sorted(names)


def test_some_names_are_read_and_counted(tmp_path, through, small_pieces):
    entries = write(tmp_path)
    calls = []
    read = reader(entries, lambda done, total: calls.append((done, total)))
    library, rest = wanted(entries), sorted(entries)
    for names in (rest[::3], rest[1::3], rest[2::3]):
        tensors = dict(read(names, as_stored(entries)))
        assert tensors.keys() == set(names)
        assert all(torch.equal(tensor, library[name]) for name, tensor in tensors.items())
        assert calls[-1][0] < calls[-1][1] or names is not rest[::3]
    total = sum(tensor.nbytes for tensor in library.values())
    assert calls[0] == (0, total)
    assert calls[-1] == (total, total)
    assert all(one[0] <= other[0] for one, other in itertools.pairwise(calls))


def test_nothing_to_read_starts_nothing(tmp_path):
    entries = write(tmp_path)
    assert list(reader(entries)([], {})) == []
    assert not threads()


def test_what_is_derived_from_a_file_is_not_read_from_it(tmp_path):
    entries = {"half": TensorEntry(file=tmp_path, shape=(2,), dtype=torch.float32, stamp=(0, 0))}
    with pytest.raises(AssertionError, match="half is no range"):
        list(reader(entries)(entries, as_stored(entries)))
    assert not threads()


def test_conversion_and_row_order_are_applied_in_this_order(tmp_path, through, small_pieces):
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    save_file({"x.attn.qkv_proj.weight": weight}, tmp_path / "x.safetensors")
    entries = read_header(tmp_path / "x.safetensors")
    read = reader(entries, keys=keymap.official_dit(2, 4))
    ((_, tensor),) = read(entries, dict.fromkeys(entries, torch.bfloat16))
    rows = [head * 12 + part * 4 + row for part in range(3) for head in range(2) for row in range(4)]
    assert torch.equal(tensor, weight[rows].bfloat16())


def test_error_of_the_callback_ends_the_load_at_once(tmp_path, through, small_pieces):
    entries = write(tmp_path)
    calls = itertools.count()

    class Cancelled(Exception):
        pass

    def cancel(done, total):
        if next(calls) == 5:
            raise Cancelled

    with pytest.raises(Cancelled):
        list(reader(entries, cancel)(entries, as_stored(entries)))
    assert next(calls) == 6
    assert not threads()


def test_error_of_the_consumer_leaves_no_threads(tiny_h3, monkeypatch):
    """Its traceback, which a host may keep, holds the frames of the load."""
    checkpoint = Checkpoint.open(tiny_h3, "fl2va")
    dit = checkpoint.new_dit(torch.bfloat16)
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", 4096)

    def fail(module, name, tensor):
        raise MemoryError(name)

    monkeypatch.setattr(loader, "_assign", fail)
    with pytest.raises(MemoryError, match=r"weight|bias|inv_freq") as info:
        checkpoint.transformer.fill(dit, CPU, None)
    assert not threads()
    assert info.tb is not None


def test_iterator_that_is_given_up_leaves_no_threads(tmp_path, through, small_pieces):
    entries = write(tmp_path)
    tensors = iter(reader(entries)(entries, as_stored(entries)))
    next(tensors)
    assert threads()
    tensors.close()
    assert not threads()


def test_slow_consumer_has_little_read_for_it(tmp_path, monkeypatch, through, small_pieces):
    save_file({f"t{index}": torch.zeros(1001, dtype=torch.int8) for index in range(100)}, tmp_path / "x.safetensors")
    entries = read_header(tmp_path / "x.safetensors")
    num_read = itertools.count()
    read = read_ahead._Piece.read
    monkeypatch.setattr(read_ahead._Piece, "read", lambda piece: (next(num_read), read(piece)))
    tensors = iter(reader(entries)(entries, as_stored(entries)))
    next(tensors)
    time.sleep(0.2)
    tensors.close()
    assert 1 <= next(num_read) <= read_ahead.NUM_AHEAD


@pytest.mark.parametrize("change", ["before", "while"])
def test_file_that_changes_is_noticed(tmp_path, through, small_pieces, change):
    entries = write(tmp_path, num_files=1)
    tensors = iter(reader(entries)(entries, as_stored(entries)))
    if change == "while":
        next(tensors)
    os.utime(tmp_path / "0.safetensors", ns=(1, 1))
    with pytest.raises(CheckpointError, match=r"0\.safetensors was changed.*Load H3"):
        list(tensors)
    assert not threads()


def test_file_that_changes_while_a_piece_is_read_is_noticed(tmp_path, monkeypatch, through):
    entries = write(tmp_path, num_files=1)
    calls = itertools.count()

    def stamp(file):
        if next(calls) == 1:  # the look that comes after the reading
            os.utime(file, ns=(1, 1))
        return file_stamp(file)

    monkeypatch.setattr(read_ahead, "file_stamp", stamp)
    with pytest.raises(CheckpointError, match="was changed"):
        list(reader(entries)(entries, as_stored(entries)))


def test_file_that_ends_early_names_key_and_bytes(tmp_path, monkeypatch, through, small_pieces):
    """A disk or a network share may give less than the size that it tells."""
    entries = write(tmp_path, num_files=1)
    stamp = next(iter(entries.values())).stamp
    path = tmp_path / "0.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    monkeypatch.setattr(read_ahead, "file_stamp", lambda file: stamp)
    last = max(entries, key=lambda name: entries[name].end)
    with pytest.raises(CheckpointError, match=rf"0\.safetensors ends inside {last}: \d+ bytes are wanted"):
        list(reader(entries)(entries, as_stored(entries)))
    assert not threads()


def test_absent_file_is_named(tmp_path, through):
    entries = write(tmp_path, num_files=2)
    os.remove(tmp_path / "1.safetensors")
    with pytest.raises(CheckpointError, match=r"1\.safetensors cannot be read \(No such file"):
        list(reader(entries)(entries, as_stored(entries)))
    assert not threads()


def test_reads_that_give_less_than_asked_are_continued(tmp_path, monkeypatch, through, filled_with_nan):
    """As network file systems may; the rest would stay what the memory held."""
    entries = write(tmp_path, num_files=1)

    class Stingy:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

        def readinto(self, target):
            return self.file.readinto(target[: max(1, len(target) // 2)])

    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda path, *args, **kwargs: Stingy(opened(path, *args, **kwargs)))
    tensors = dict(reader(entries)(entries, as_stored(entries)))
    monkeypatch.undo()
    library = wanted(entries)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in library.items())


@pytest.mark.parametrize("part", ["dit", "text_encoder", "video_encoder", "video_decoder", "audio_encoder"])
def test_no_uninitialised_value_reaches_a_model(tiny_h3, part, filled_with_nan):
    checkpoint = Checkpoint.open(tiny_h3, "fl2va")
    dtype = {} if part.endswith("_encoder") and part != "text_encoder" else {"dtype": torch.float32}
    module = getattr(checkpoint, f"load_{part}")(CPU, **dtype)
    for name, tensor in module.state_dict().items():
        assert not tensor.is_meta, name
        assert tensor.isfinite().all(), name


def test_reader_that_leaves_a_tensor_out_is_noticed(tiny_h3):
    checkpoint = Checkpoint.open(tiny_h3, "fl2va")
    component = checkpoint.audio_decoder
    read = component.reader(CPU, None)

    def forgets(names, dtypes):
        return (named for named in read(names, dtypes) if named[0] != "dec_in_proj.bias")

    with pytest.raises(CheckpointError, match=r"dec_in_proj\.bias was not read"):
        loader.load(checkpoint.new_audio_decoder(), component.entries, component.folder, forgets)


def test_tensors_outlive_files_and_reading(tmp_path, through, small_pieces):
    entries = write(tmp_path)
    library = {name: tensor.clone() for name, tensor in wanted(entries).items()}
    tensors = dict(reader(entries)(entries, as_stored(entries)))
    for file in tmp_path.glob("*.safetensors"):
        file.write_bytes(bytes(file.stat().st_size))
    gc.collect()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in library.items())


MEASURE = """
import runpy, sys, torch
from pathlib import Path
runpy.run_path("_bootstrap.py")["register"]()
from comfyui_h3.h3core.checkpoint import read_ahead
from comfyui_h3.h3core.checkpoint.index import TensorEntry, file_stamp, read_header
from comfyui_h3.h3core.checkpoint.keymap import KeyMap
from comfyui_h3.h3core.checkpoint.loader import Reader

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

if sys.argv[2] == "device":
    read_ahead._OnHost = lambda: read_ahead._OnDevice(torch.device("cpu"))
entries = {n: e for f in sorted(Path(sys.argv[1]).glob("*")) for n, e in read_header(f).items()}
read = Reader(entries=entries, keymap=KeyMap(), device=torch.device("cpu"), on_load=None)
idle, most = anonymous(), 0
for name, tensor in read(entries, dict.fromkeys(entries, torch.bfloat16)):
    most = max(most, anonymous() - idle)
    del tensor
print(most)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc of Linux")
def test_memory_is_two_tensors_and_what_is_read_ahead(tmp_path, through, request):
    """Of 1.2 GB that are taken away one by one: 100 MB as stored, half of it converted, and what comes next."""
    largest, num = 100 << 20, 12
    header = {
        f"t{index}": {
            "dtype": "F32",
            "shape": [largest // 4],
            "data_offsets": [index * largest, (index + 1) * largest],
        }
        for index in range(num)
    }
    raw = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    os.truncate(path, 8 + len(raw) + num * largest)  # a hole, which takes no disk
    kind = request.node.callspec.params["through"]
    command = [sys.executable, "-c", textwrap.dedent(MEASURE), str(tmp_path), kind]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    ahead = read_ahead.NUM_AHEAD * read_ahead.PIECE_BYTES
    assert int(done.stdout) <= ahead + 2 * largest + (64 << 20)


@pytest.mark.gpu
def test_tensors_on_a_gpu_are_those_of_the_library(tmp_path, small_pieces, device):
    entries = write(tmp_path)
    read = Reader(entries=entries, keymap=KeyMap(), device=device, on_load=None)
    library = wanted(entries)
    for name, tensor in read(entries, as_stored(entries)):
        assert tensor.device == torch.empty(0, device=device).device
        assert torch.equal(tensor.cpu(), library[name]), name


@pytest.mark.parametrize("form", ["one_thread", "reader"])
def test_benchmark_reads_what_it_has_written(tmp_path, form):
    files = load_benchmark.write_shards(tmp_path, 3_000_000)
    entries = {name: entry for file in files for name, entry in read_header(file).items()}
    assert len(files) > 1
    assert sum(entry.num_bytes for entry in entries.values()) == pytest.approx(3_000_000, rel=0.02)
    load_benchmark.drop_from_page_cache(files)
    figures = load_benchmark.measure(form, files, CPU)
    assert figures["s"] > 0
    assert figures["anonymous_gb"] < 1
