"""Memory and seconds that a reference video of 15 s takes before anything is encoded, on top of the idle program.

    python _bootstrap.py benchmarks.reference_memory

Writes 1344x768 at 30 fps with sound (H.264, AAC) into a temporary folder, reads it in a program of its own, and notes
the largest resident memory of that program in each stage. The result alone, 362 frames of 3 MB, is 1.04 GiB (1.12 GB).
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import torch

from comfyui_h3.benchmarks.record import ROOT, write_record
from comfyui_h3.h3core.media.clips import FileClip, conform
from comfyui_h3.h3core.media.mp4 import write_mp4
from comfyui_h3.h3core.media.sound import reference_waveform
from comfyui_h3.h3core.types import Audio, Frames

WIDTH, HEIGHT, RATE, SOUND_RATE = 1344, 768, 30, 48000
MAX_FRAMES = 362  # of the longest video that H3 was trained for
LIMIT_GB = 2.5


def write_clip(path: Path, seconds: float, width: int, height: int) -> None:
    """A moving pattern with noise and a tone: neither trivial to decode nor constant."""
    num_frames = round(seconds * RATE)
    generator = torch.Generator().manual_seed(0)
    picture = torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=generator)
    picture[:, : width // 2] = torch.arange(width // 2).remainder(256).to(torch.uint8)[:, None]
    pixels = picture[None].expand(num_frames, -1, -1, -1).clone()
    for index in range(num_frames):
        pixels[index] = picture.roll(4 * index, dims=1)
    t = torch.arange(round(seconds * SOUND_RATE)) / SOUND_RATE
    tone = 0.5 * torch.sin(2 * math.pi * 440 * t).expand(2, -1)
    frames = Frames(pixels=pixels, fps=Fraction(RATE))
    write_mp4(path, frames, Audio(samples=tone, sample_rate=SOUND_RATE), preset="ultrafast")


def resident_bytes(peak: bool) -> int:
    """Memory of this program, now or the largest since ``reset_peak``."""
    name = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def reset_peak() -> None:
    """Starts the largest resident memory anew, from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


class Stages:
    """Peak above idle, and seconds, of one stage after another; what a stage returns stays for the next ones."""

    def __init__(self) -> None:
        self.idle = resident_bytes(peak=False)
        self.figures: dict[str, float] = {}

    def run(self, name: str, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        reset_peak()
        start = time.perf_counter()
        result = work()
        self.figures[f"seconds.{name}"] = time.perf_counter() - start
        self.figures[f"peak_gb.{name}"] = (resident_bytes(peak=True) - self.idle) / 1e9
        return result


def measure(path: Path) -> dict[str, float]:
    """Figures of every stage in this program."""
    torch.zeros(1).add_(1)  # what PyTorch allocates once is part of idle
    stages = Stages()
    clip = FileClip(path)
    frames = stages.run("conform", lambda: conform(clip, max_frames=MAX_FRAMES))

    def waveform() -> torch.Tensor:
        sound = clip.sound(MAX_FRAMES / 24)
        assert sound is not None
        return reference_waveform(sound, MAX_FRAMES / 24)

    stages.run("sound", waveform)
    # The next stage of a reference, the video VAE's encoder, belongs here: stages.run("encode", ...) over ``frames``.
    return {
        **stages.figures,
        "result_gb.frames": frames.nbytes / 1e9,
        "result.num_frames": len(frames),
        "peak_gb.all": max(value for name, value in stages.figures.items() if name.startswith("peak_gb.")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.reference_memory", description="Memory of a reference video.")
    parser.add_argument("--seconds", type=float, default=MAX_FRAMES / 24, help="of the clip (default 15.08)")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--height", type=int, default=HEIGHT)
    parser.add_argument("--out", type=Path, help="folder of the JSON; default benchmarks/results")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "clip.mp4"
        write_clip(path, args.seconds, args.width, args.height)
        command = [sys.executable, str(ROOT / "_bootstrap.py"), "benchmarks.reference_memory", "--measure", str(path)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures = json.loads(done.stdout)
    shapes = {
        "width": args.width,
        "height": args.height,
        "fps": RATE,
        "seconds": args.seconds,
        "cpu_threads": torch.get_num_threads(),
    }
    path = write_record("reference-memory", figures, shapes, device=torch.device("cpu"), out=args.out)
    for figure, value in figures.items():
        print(f"{figure:24} {value:10.3f}")
    print(path)
    if figures["peak_gb.all"] > LIMIT_GB:
        sys.exit(f"more than the {LIMIT_GB} GB that a reference video may take")


if __name__ == "__main__":
    main()
