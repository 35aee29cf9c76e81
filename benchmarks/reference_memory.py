"""Memory and seconds that a reference video of 15 s takes on the host, above the idle engine.

    python _bootstrap.py benchmarks.reference_memory

Writes 1344x768 at 30 fps with sound (H.264, AAC) into a temporary folder, reads and encodes it with the tiny H3 in a
program of its own, and notes the largest resident memory of that program in each stage: the reading alone, then the
whole stage as a job runs it. The frames alone, 362 of 3 MB, are 1.04 GiB (1.12 GB). On a CPU the encoding takes long,
and its activations count too.
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
from typing import TypeVar

import torch

from comfyui_h3.benchmarks.record import ROOT, write_record
from comfyui_h3.h3core.config import EngineConfig
from comfyui_h3.h3core.engine import Engine
from comfyui_h3.h3core.media.clips import FileClip, MemoryClip
from comfyui_h3.h3core.media.conform import conform
from comfyui_h3.h3core.media.mp4 import write_mp4
from comfyui_h3.h3core.media.references import Keyframe, MediaRequest, ReferenceVideo
from comfyui_h3.h3core.media.sound import reference_waveform
from comfyui_h3.h3core.tiny.write import write_official
from comfyui_h3.h3core.types import Audio, EncodedMedia, Frames

T = TypeVar("T")

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
    """Peak above idle, and seconds, of one stage after another."""

    def __init__(self) -> None:
        self.idle = resident_bytes(peak=False)
        self.figures: dict[str, float] = {}

    def run(self, name: str, work: Callable[[], T]) -> T:
        reset_peak()
        start = time.perf_counter()
        result = work()
        self.figures[f"seconds.{name}"] = time.perf_counter() - start
        self.figures[f"peak_gb.{name}"] = (resident_bytes(peak=True) - self.idle) / 1e9
        return result


def measure(folder: Path, device: str) -> dict[str, float]:
    """Figures of every stage in this program."""
    engine = idle_engine(folder / "tiny-h3", device)
    stages = Stages()
    clip = FileClip(folder / "clip.mp4")
    frames = stages.run("conform", lambda: conform(clip, max_frames=MAX_FRAMES))

    def waveform() -> torch.Tensor:
        sound = clip.sound(MAX_FRAMES / 24)
        assert sound is not None
        return reference_waveform(sound, MAX_FRAMES / 24)

    stages.run("sound", waveform)
    result = {"result_gb.frames": frames.nbytes / 1e9, "result.num_frames": float(len(frames))}
    del frames

    def encode() -> EncodedMedia:
        references = (ReferenceVideo(clip=clip),)
        return engine.encode_media(
            MediaRequest(width=WIDTH, height=HEIGHT, num_frames=MAX_FRAMES, references=references)
        )

    stages.run("encode_media", encode)
    return {
        **stages.figures,
        **result,
        "peak_gb.all": max(value for name, value in stages.figures.items() if name.startswith("peak_gb.")),
    }


def idle_engine(checkpoint: Path, device: str) -> Engine:
    """An engine whose encoders have run once: what they and their libraries keep is part of idle."""
    write_official(checkpoint)
    engine = Engine(EngineConfig(checkpoint=checkpoint, device=device))
    sound = Audio(samples=torch.zeros(2, 32000))
    small = MemoryClip(torch.zeros(22, 64, 64, 3, dtype=torch.uint8), Fraction(24), sound)
    picture = Keyframe(pixels=torch.zeros(64, 64, 3, dtype=torch.uint8))
    references = (ReferenceVideo(clip=small, short_edge=64),)
    engine.encode_media(MediaRequest(width=64, height=64, num_frames=22, keyframes=(picture,), references=references))
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.reference_memory", description="Memory of a reference video.")
    parser.add_argument("--seconds", type=float, default=MAX_FRAMES / 24, help="of the clip (default 15.08)")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--height", type=int, default=HEIGHT)
    parser.add_argument("--device", default="auto", help="of the engine: auto, cpu or cuda:N")
    parser.add_argument("--commit", help="commit of a copy without git")
    parser.add_argument("--out", type=Path, help="folder of the JSON; default benchmarks/results")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.device)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "clip.mp4"
        write_clip(path, args.seconds, args.width, args.height)
        command = [sys.executable, str(ROOT / "_bootstrap.py"), "benchmarks.reference_memory"]
        command += ["--measure", scratch, "--device", args.device]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures = json.loads(done.stdout)
    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    shapes = {
        "width": args.width,
        "height": args.height,
        "fps": RATE,
        "seconds": args.seconds,
        "cpu_threads": torch.get_num_threads(),
    }
    path = write_record("reference_memory", figures, shapes, device=device, out=args.out, commit=args.commit)
    for figure, value in figures.items():
        print(f"{figure:24} {value:10.3f}")
    print(path)
    if figures["peak_gb.all"] > LIMIT_GB:
        sys.exit(f"more than the {LIMIT_GB} GB that a reference video may take")


if __name__ == "__main__":
    main()
