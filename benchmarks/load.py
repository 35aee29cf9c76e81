"""How fast weights come from disk into tensors, beside ``dd`` over the same bytes and one thread over mapped files.

    python _bootstrap.py benchmarks.load --gb 20

Writes random shards with the sizes of the transformer's tensors, large and small, and reads them from the disk (the
shards leave the page cache before each reading) and again from the page cache. Each reading is a program of its own,
whose anonymous memory above idle is watched; tensors are let go as they come, as they are when they go to a GPU. The
median of the readings is kept. A disk is what the machine calls so: a virtual one may have a cache of its own below.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from comfyui_h3.benchmarks.record import ROOT, write_record
from comfyui_h3.h3core.checkpoint import read_ahead
from comfyui_h3.h3core.checkpoint.index import TensorEntry, read_header
from comfyui_h3.h3core.checkpoint.keymap import KeyMap
from comfyui_h3.h3core.checkpoint.loader import Reader

SHAPES = ((21504, 5376), (5376, 7168), (28672, 5376), (5376, 14336), (5376,), (5376,), (128,), (128,))  # of one block
SHARD_BYTES = 5_000_000_000
FORMS = ("dd", "one_thread", "reader")


def write_shards(folder: Path, num_bytes: int) -> list[Path]:
    """bfloat16 tensors of ``num_bytes`` together, a shard at a time."""
    files: list[Path] = []
    tensors: dict[str, Tensor] = {}
    written = held = index = 0
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(-(2**15), 2**15, (1 << 24,), dtype=torch.int16, generator=generator).view(torch.bfloat16)
    while written < num_bytes:
        shape = SHAPES[index % len(SHAPES)]
        rows = min(shape[0], max(1, (num_bytes - written) // (2 * torch.Size(shape[1:]).numel())))
        num = torch.Size((rows, *shape[1:])).numel()
        tensors[f"blocks.{index}"] = noise.repeat(-(-num // len(noise)))[:num].view(rows, *shape[1:])
        written, held, index = written + 2 * num, held + 2 * num, index + 1
        if held >= min(SHARD_BYTES, num_bytes // 4) or written >= num_bytes:
            files.append(folder / f"model-{len(files):05}.safetensors")
            save_file(tensors, files[-1])
            tensors, held = {}, 0
    return files


def drop_from_page_cache(files: list[Path]) -> None:
    """What is written and not mapped leaves; this needs no rights beyond those of reading."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def one_thread(entries: dict[str, TensorEntry], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """The plain form: a mapped file, one tensor after the other."""
    for path in dict.fromkeys(entry.file for entry in entries.values()):
        with safe_open(path, framework="pt") as file:
            for name in [name for name, entry in entries.items() if entry.file == path]:
                yield name, file.get_tensor(name).to(device=device, copy=True)


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def measure(form: str, files: list[Path], device: torch.device) -> dict[str, float]:
    """Seconds of one reading, and the most of anonymous memory above that before it, by samples of 10 ms."""
    entries = {name: entry for file in files for name, entry in read_header(file).items()}
    torch.zeros(1, device=device)
    idle = most = anonymous_bytes()
    ended = threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.01):
            most = max(most, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    if form == "reader":
        read = Reader(entries=entries, keymap=KeyMap(), device=device, on_load=None)
        tensors = iter(read(entries, {name: entry.dtype for name, entry in entries.items()}))
    else:
        tensors = one_thread(entries, device)
    for _, tensor in tensors:
        del tensor
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    ended.set()
    watcher.join()
    return {"s": seconds, "anonymous_gb": (most - idle) / 1e9}


def run(form: str, files: list[Path], device: torch.device) -> dict[str, float]:
    """One reading by a program of its own."""
    if form == "dd":
        start = time.perf_counter()
        for file in files:
            subprocess.run(["dd", f"if={file}", "of=/dev/null", "bs=16M"], check=True, stderr=subprocess.DEVNULL)
        return {"s": time.perf_counter() - start}
    command = [sys.executable, str(ROOT / "_bootstrap.py"), "benchmarks.load", "--measure", form]
    command += ["--device", str(device), *map(str, files)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def compare(files: list[Path], device: torch.device, num_runs: int) -> dict[str, float]:
    """Figures of all forms, the forms taking turns."""
    num_bytes = sum(file.stat().st_size for file in files)
    figures: dict[str, float] = {}
    for state in ("disk", "page_cache"):
        runs: dict[str, list[dict[str, float]]] = {form: [] for form in FORMS}
        if state == "page_cache":
            run("dd", files, device)
        for _ in range(num_runs):
            for form in FORMS:
                if state == "disk":
                    drop_from_page_cache(files)
                runs[form].append(run(form, files, device))
        for form, results in runs.items():
            seconds = statistics.median(result["s"] for result in results)
            figures |= {f"{state}.{form}_s": seconds, f"{state}.{form}_gb_per_s": num_bytes / 1e9 / seconds}
            if form != "dd":
                figures[f"{state}.{form}_anonymous_gb"] = max(result["anonymous_gb"] for result in results)
        figures[f"{state}.reader_over_dd"] = figures[f"{state}.reader_s"] / figures[f"{state}.dd_s"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.load", description="Reading of weights, beside dd.")
    parser.add_argument("--gb", type=float, default=2.0, help="of the shards that are written (default 2)")
    parser.add_argument("--runs", type=int, default=3, help="of each form (default 3)")
    parser.add_argument("--folder", type=Path, help="where the shards are written; default: the system's temporary one")
    parser.add_argument(
        "--device", type=torch.device, default=torch.device("cpu"), help="of the tensors: cpu or cuda:N"
    )
    parser.add_argument("--commit", help="commit of a copy without git")
    parser.add_argument("--out", type=Path, help="folder of the JSON; default benchmarks/results")
    parser.add_argument("--measure", choices=FORMS[1:], help=argparse.SUPPRESS)
    parser.add_argument("files", type=Path, nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.files, args.device)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        files = write_shards(Path(scratch), int(args.gb * 1e9))
        figures = compare(files, args.device, args.runs)
    shapes = {
        "gb": args.gb,
        "num_shards": len(files),
        "runs": args.runs,
        "cpu_count": os.cpu_count(),
        "num_threads": read_ahead.NUM_THREADS,
        "to": args.device.type,
    }
    path = write_record("load", figures, shapes, device=args.device, out=args.out, commit=args.commit)
    for figure, value in figures.items():
        print(f"{figure:32} {value:10.3f}")
    print(path)


if __name__ == "__main__":
    main()
