"""What a file says of itself is checked before anything is believed: no crash, no hang, no memory of its choosing."""

import json
import os
import pickle
import random
import time
import tracemalloc

import pytest
import torch
from safetensors.torch import load_file, save_file

from comfyui_h3.h3core.checkpoint.index import MAX_HEADER_ALONE_BYTES, read_header, read_index, read_json
from comfyui_h3.h3core.checkpoint.keymap import KeyMap
from comfyui_h3.h3core.checkpoint.loader import Reader
from comfyui_h3.h3core.errors import CheckpointError

CPU = torch.device("cpu")
TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b.weight": torch.arange(40, dtype=torch.bfloat16).view(5, 8),
    "scale": torch.tensor(2.0),
    "empty": torch.empty(0, 7),
    "codes": torch.tensor([1, -2, 3], dtype=torch.int8),
}
F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HOSTILE = (
    0,
    -1,
    2**31,
    2**63,
    2**64,
    10**18,
    1.0,
    1e400,
    True,
    None,
    "",
    "F32",
    "F4",
    "\ud800",
    [],
    [-2, -2],
    {},
    [[]],
)


def write(path, header, body=b"", length=None):
    """A file with this header (bytes, or values for JSON), which says that it has ``length`` bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + body)
    return path


def refused(path, read=read_header):
    with pytest.raises(CheckpointError) as info:
        read(path)
    message = str(info.value)
    assert str(path) in message
    assert len(message) < 1500
    return message


def with_value(**changes):
    return {"good": F32, "bad.weight": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]} | changes}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (with_value(data_offsets=[4, 12]), ["bad.weight overlaps good", "byte"]),
        (with_value(data_offsets=[0, 8]), ["overlaps"]),
        (with_value(shape=[1], data_offsets=[12, 16]), ["bad.weight leaves a hole behind good"]),
        (with_value(data_offsets=[16, 24]), ["bad.weight", "cut short"]),
        (with_value(data_offsets=[2**63, 2**63 + 8]), ["bad.weight", "cut short"]),
        (with_value(data_offsets=[16, 8]), ["bad.weight", "[16, 8]"]),
        (with_value(data_offsets=[-8, 0]), ["bad.weight", "[-8, 0]"]),
        (with_value(data_offsets=[8.0, 16.0]), ["bad.weight", "[8.0, 16.0]"]),
        (with_value(data_offsets=[8]), ["bad.weight", "[8]"]),
        (with_value(data_offsets=None), ["bad.weight", "None"]),
        (with_value(shape=[-1, -2]), ["bad.weight", "[-1, -2]"]),
        (with_value(shape=[2**40, 2**40]), ["bad.weight", f"[{2**40}, {2**40}]", "2**60"]),
        (with_value(shape=[0, 2**62], data_offsets=[8, 8]), ["bad.weight", f"[0, {2**62}]"]),
        (with_value(shape=[2.0]), ["bad.weight", "[2.0]"]),
        (with_value(shape=[True, 2]), ["bad.weight", "[True, 2]"]),
        (with_value(shape="2"), ["bad.weight", "2"]),
        (with_value(shape=[1] * 10_000 + [2]), ["bad.weight", "at most 16"]),
        (with_value(shape=[3]), ["bad.weight", "F32 [3], 12 bytes", "[8, 16], 8 bytes"]),
        (with_value(dtype="F33"), ["bad.weight", "F33", "BF16"]),
        (with_value(dtype=["F32"]), ["bad.weight", "['F32']"]),
        (with_value(dtype=None), ["bad.weight", "None"]),
        ({"good": F32, "bad.weight": {"dtype": "F32", "shape": [2]}}, ["bad.weight", "data_offsets"]),
        ({"good": F32, "bad.weight": 7}, ["bad.weight", "7"]),
        ({"good": F32, "x" * 10_000: 7}, ["xxxxx..."]),
        ({"good": F32, "\x1b[2Jx\ud800": 7}, ["\\x1b[2Jx\\ud800"]),
        ([F32], ["header"]),
        (b'{"a": 1' + b"0" * 1000 + b"}", ["1001 digits"]),
        (b'{"a":' + b"[" * 50_000 + b"}", ["header"]),
        (b"{" + json.dumps(F32).encode("utf-16"), ["header"]),
        (b'{"a": "\xff"}', ["header"]),
        ({"good": F32, "__metadata__": {"n": 1}, "bad.weight": F32 | {"data_offsets": [8, 16]}}, ["download it again"]),
    ],
)
def test_false_description_is_refused_with_what_was_found(tmp_path, header, words):
    message = refused(write(tmp_path / "x.safetensors", header, bytes(16)))
    assert all(word in message for word in words), message


@pytest.mark.parametrize("inner", [False, True])
def test_key_that_is_there_twice_is_refused(tmp_path, inner):
    one = json.dumps(F32).encode()
    raw = b'{"a": %s, "a": %s}' % (one, one) if not inner else b'{"a": %s}' % one.replace(b"}", b', "dtype": "I32"}')
    message = refused(write(tmp_path / "x.safetensors", raw, bytes(8)))
    assert ("key dtype" if inner else "key a") in message


def test_shard_map_with_a_key_twice_is_refused(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text('{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}')
    assert "key a is there more than once" in refused(path, read_json)


def test_shard_with_a_name_no_file_can_have(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": "x" * 5000}}))
    with pytest.raises(CheckpointError, match=r"index\.json names shards that cannot be looked for"):
        read_index(tmp_path, lambda key: True)


def test_bytes_behind_the_last_tensor_are_refused(tmp_path):
    message = refused(write(tmp_path / "x.safetensors", {"good": F32}, bytes(9)))
    assert "up to the end of good" in message


def test_cut_body_names_the_key_that_is_not_whole(tmp_path):
    message = refused(write(tmp_path / "x.safetensors", with_value(), bytes(15)))
    assert "ends before bad.weight does" in message


@pytest.mark.parametrize("length", [65, 2**20, 2**27, 2**63, 2**64 - 1])
def test_header_larger_than_file_or_format_takes_no_memory(tmp_path, length):
    path = write(tmp_path / "x.safetensors", {"good": F32}, length=length)
    assert os.path.getsize(path) == 72
    assert str(length) in refused_in(path, 1 << 20)


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (pickle.dumps({"a": 1}, protocol=2), "pickle"),
        (pickle.dumps({"a": 1}, protocol=5), "pickle"),
        (None, "pickles, which are never read"),
        (b"GGUF\x03\x00\x00\x00", "GGUF"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
        (b"<!DOCTYPE html><html>", "web site"),
    ],
)
def test_other_format_under_the_name_is_recognised_and_not_executed(tmp_path, start, words):
    path = tmp_path / "x.safetensors"
    if start is None:
        torch.save(TENSORS, path)
    else:
        path.write_bytes(start + bytes(1000))
    assert words in refused(path)


def refused_in(path, extra_bytes, read=read_header):
    """The message of a refusal that took at most twice the file's size and ``extra_bytes``."""
    tracemalloc.start()
    try:
        message = refused(path, read)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 2 * path.stat().st_size + extra_bytes, peak
    return message


@pytest.mark.parametrize("unit", [b"[],", b"{},", b'"",', b"0,", b'{"a":0},', b'[0,"b"],'])
def test_header_that_would_take_many_times_its_size_is_refused_before(tmp_path, unit):
    raw = b'{"a":[' + unit * (MAX_HEADER_ALONE_BYTES // len(unit) - 10) + b"0]}"
    message = refused_in(write(tmp_path / "x.safetensors", raw), 80 << 20)
    assert "values" in message


def test_header_without_weights_behind_it_is_refused(tmp_path):
    raw = b'{"__metadata__": {"a": "' + b"x" * MAX_HEADER_ALONE_BYTES + b'"}}'
    message = refused_in(write(tmp_path / "x.safetensors", raw), 1 << 20)
    assert f"{MAX_HEADER_ALONE_BYTES} are allowed" in message


def test_commas_in_metadata_do_not_count_as_values(tmp_path):
    """Files of trainers hold long texts there."""
    text = 'a,[{\\",' * 1_000_000
    save_file(TENSORS, tmp_path / "x.safetensors", metadata={"tags": text})
    assert read_header(tmp_path / "x.safetensors").keys() == TENSORS.keys()


@pytest.mark.parametrize("read", [read_header, read_json])
def test_pipe_is_not_waited_for(tmp_path, read):
    os.mkfifo(tmp_path / "x.safetensors")
    assert "is not a file" in refused(tmp_path / "x.safetensors", read)


def test_linked_files_and_folders_are_read(tmp_path):
    """As the cache of huggingface_hub has them."""
    blob, folder = tmp_path / "blobs" / "0123", tmp_path / "snapshots" / "abc"
    blob.parent.mkdir()
    folder.mkdir(parents=True)
    save_file(TENSORS, blob)
    (folder / "model.safetensors").symlink_to(blob)
    (tmp_path / "model").symlink_to(folder)
    assert read_index(tmp_path / "model", lambda key: True).keys() == TENSORS.keys()


@pytest.mark.parametrize(
    "left",
    [
        "m/model.safetensors.incomplete",
        "m/.cache/huggingface/download/x/abc.incomplete",
        ".cache/huggingface/download/m/model-1.abc.incomplete",
        "blobs/abc.incomplete",
    ],
)
@pytest.mark.parametrize("damage", ["absent", "cut", "shard"])
def test_download_that_has_not_ended_is_named(tmp_path, left, damage):
    folder = tmp_path / ("snapshots/m" if left.startswith("blobs") else "m")
    folder.mkdir(parents=True)
    if damage == "cut":
        save_file(TENSORS, folder / "model.safetensors")
        os.truncate(folder / "model.safetensors", os.path.getsize(folder / "model.safetensors") - 1)
    elif damage == "shard":
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "1.safetensors"}}')
    (tmp_path / left).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / left).touch()
    with pytest.raises(CheckpointError) as info:
        read_index(folder, lambda key: True)
    assert f"{left.rpartition('/')[2]} shows that a download has not ended" in str(info.value)


def test_complete_looking_file_that_is_still_downloaded_is_refused(tmp_path):
    """aria2 gives a file its final size at once, zeros where nothing has come yet."""
    save_file(TENSORS, tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors.aria2").touch()
    assert "x.safetensors.aria2" in refused(tmp_path / "x.safetensors")


def mutate(raw, rng):
    """Bytes of a file with one to three faults: in its header's values, in its text, in its length, in the body."""
    length = int.from_bytes(raw[:8], "little")
    header, body = raw[8 : 8 + length], raw[8 + length :]
    says = None
    for _ in range(rng.randint(1, 3)):
        fault = rng.randrange(9)
        if fault == 0:
            header = changed_values(header, rng)
        elif fault in (1, 2) and header:
            position = rng.randrange(len(header))
            new = rng.choice([b"", b"9", b"-", b"[", b"}", b'"', b",", rng.randbytes(1), header[:20]])
            header = header[:position] + new + header[position + rng.randint(0, 4) :]
        elif fault == 3:
            says = rng.choice([0, 1, 7, len(header) - 1, len(header) + 1, 10**8, 2**31, 2**63, rng.getrandbits(64)])
        elif fault == 4:
            body = body[: rng.randint(0, len(body))]
        elif fault == 5:
            body += bytes(rng.randint(1, 100))
        elif fault in (6, 7) and body:
            body = bytearray(body)
            body[rng.randrange(len(body))] = rng.randrange(256)
            body = bytes(body)
        elif fault == 8:
            header += b" " * rng.randint(0, 8)
    whole = (len(header) if says is None else max(0, says)).to_bytes(8, "little") + header + body
    return whole[: rng.randrange(len(whole))] if rng.random() < 0.05 else whole


def changed_values(header, rng):
    try:
        values = json.loads(header)
    except ValueError:
        return header
    keys = [key for key, value in values.items() if isinstance(value, dict)] if isinstance(values, dict) else []
    if not keys:
        return header
    key = rng.choice(keys)
    change = rng.randrange(5)
    if change == 0:
        values[key] = rng.choice(HOSTILE)
    elif change == 1:
        values[key][rng.choice(["dtype", "shape", "data_offsets"])] = rng.choice(HOSTILE)
    elif change == 2:
        numbers = values[key].get(rng.choice(["shape", "data_offsets"]))
        if isinstance(numbers, list):
            numbers[rng.randrange(len(numbers) + 1) : rng.randrange(3)] = [rng.choice(HOSTILE)]
    elif change == 3:
        values[rng.choice(["", "new", key + "x", "\x00"])] = values.pop(key)
    else:
        other = rng.choice(keys)
        values[key], values[other] = values[other], values[key]
    return json.dumps(values).encode("utf-8", "surrogatepass")


def test_2000_damaged_files_are_refused_or_read_as_the_library_reads_them(tmp_path):
    good, path = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    save_file(TENSORS, good, metadata={"format": "pt"})
    raw = good.read_bytes()
    num_read = 0
    tracemalloc.start()
    try:
        for seed in range(2000):
            path.write_bytes(mutate(raw, random.Random(seed)))
            tracemalloc.reset_peak()
            held, start = tracemalloc.get_traced_memory()[0], time.perf_counter()
            entries = attempt(path)
            # Beside twice the file, which is less than 1 KB, what the program itself takes.
            assert tracemalloc.get_traced_memory()[1] - held <= 2 * path.stat().st_size + (256 << 10), seed
            assert time.perf_counter() - start < 5, seed
            if entries is not None:
                check_against_library(path, entries, seed)
                num_read += 1
    finally:
        tracemalloc.stop()
    assert 100 < num_read < 1000  # damage of values alone, which no check can see


def attempt(path):
    """What the header holds, or None when it is refused, by the name of the file."""
    try:
        return read_header(path)
    except CheckpointError as error:
        if str(path) not in str(error):
            raise
        return None


def check_against_library(path, entries, seed):
    wanted = load_file(path)
    assert entries.keys() == wanted.keys(), seed
    assert sum(entry.num_bytes for entry in entries.values()) <= path.stat().st_size
    reader = Reader(entries=entries, keymap=KeyMap(), device=CPU, on_load=None)
    for name, tensor in reader(entries, {name: entry.dtype for name, entry in entries.items()}):
        assert tensor.shape == wanted[name].shape, seed
        assert tensor.dtype == wanted[name].dtype, seed
        assert torch.equal(tensor.view(-1).view(torch.uint8), wanted[name].view(-1).view(torch.uint8)), seed
