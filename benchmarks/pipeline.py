"""Seconds of every stage, prompt to MP4: after one warm-up of the full shape, the median of the counted runs.

    python _bootstrap.py benchmarks.pipeline --checkpoint DIR --frames 124 --runs 3

Without --checkpoint the tiny H3 runs: its figures say that the pipeline works, nothing about the real model.
"""

import argparse
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

import torch

from comfyui_h3.benchmarks.record import write_record
from comfyui_h3.h3core.config import PRECISIONS, EngineConfig
from comfyui_h3.h3core.engine import Engine
from comfyui_h3.h3core.timing import Timings
from comfyui_h3.h3core.tiny.write import write_official
from comfyui_h3.h3core.types import Request

PROMPT = (
    "integrated_multimodal_description: [Shot 1] A fishing boat leaves a quiet harbour at dawn; the camera holds still."
    "\n\noverall_soundscape: Small waves and a distant engine.\n\nnon_diegetic_music: N/A"
)
TINY_SIZE = {"width": 128, "height": 96, "frames": 22}
REAL_SIZE = {"width": 1344, "height": 768, "frames": 124}


def run_once(engine: Engine, request: Request, sigma_points: int, folder: Path) -> Timings:
    """One job; the same stages, in the same order, as the shipped workflow."""
    latents = engine.sample(engine.encode(request), sigma_points=sigma_points)
    frames, audio = engine.decode_video(latents), engine.decode_audio(latents)
    return engine.save(frames, audio, folder / "clip.mp4").timings


def figures(runs: list[Timings]) -> dict[str, float]:
    """Median seconds of each stage but loading, of a whole job, and of one forward."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for timings in runs:
        stages = [stage for stage in timings.stages if not stage.name.startswith("load_")]
        for stage in stages:
            seconds[f"seconds.{stage.name}"].append(stage.seconds)
            if stage.name == "sample":
                seconds["seconds.forward"].append(stage.seconds / stage.num_units)
        seconds["seconds.total"].append(sum(stage.seconds for stage in stages))
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.pipeline", description="Stage times of a text-to-video job.")
    parser.add_argument("--checkpoint", type=Path, help="folder that holds FL2VA/; default: the tiny H3")
    parser.add_argument("--width", type=int)
    parser.add_argument("--height", type=int)
    parser.add_argument("--frames", type=int)
    parser.add_argument("--sigma-points", type=int, default=50, help="one more than forwards (default 50)")
    parser.add_argument("--runs", type=int, default=3, help="counted runs (default 3)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", choices=PRECISIONS, default="auto")
    parser.add_argument("--out", type=Path, help="folder of the JSON; default benchmarks/results")
    args = parser.parse_args()
    size = REAL_SIZE if args.checkpoint else TINY_SIZE
    size = {name: getattr(args, name) or default for name, default in size.items()}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if args.checkpoint is None:
            write_official(folder / "tiny-h3")
        engine = Engine(
            EngineConfig(checkpoint=args.checkpoint or folder / "tiny-h3", device=args.device, precision=args.precision)
        )
        request = Request(prompt=PROMPT, width=size["width"], height=size["height"], num_frames=size["frames"])
        run_once(engine, request, args.sigma_points, folder)
        runs = [run_once(engine, request, args.sigma_points, folder) for _ in range(args.runs)]
    measured = figures(runs)
    shapes = {**size, "sigma_points": args.sigma_points, "runs": args.runs, "dtype": str(engine.dtype)}
    if engine.device.type == "cpu":
        shapes["cpu_threads"] = torch.get_num_threads()
    name = "pipeline" if args.checkpoint else "pipeline-tiny"
    path = write_record(name, measured, shapes, device=engine.device, out=args.out)
    for figure, value in measured.items():
        print(f"{figure:24} {value:10.4f}")
    print(path)


if __name__ == "__main__":
    main()
