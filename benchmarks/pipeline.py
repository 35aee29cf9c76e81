"""Seconds of every stage, prompt to MP4: after one warm-up of the full shape, the median of the counted runs.

    python _bootstrap.py benchmarks.pipeline --checkpoint DIR --frames 124 --runs 3

Without --checkpoint the tiny H3 runs: its figures say that the pipeline works, nothing about the real model. With
--full-size random weights of the released sizes run, whose times are those of the real ones; the counted run then
follows a short one, whose shapes it shares but for the transformer's.

"unexplained" is the share of the wall time, from the prompt to the file on disk, that no stage accounts for.
"""

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch

from comfyui_h3.benchmarks.full_size import full_size_checkpoints
from comfyui_h3.benchmarks.record import write_record
from comfyui_h3.h3core.accel.attention import ATTENTIONS
from comfyui_h3.h3core.config import PRECISIONS, EngineConfig
from comfyui_h3.h3core.engine import Engine
from comfyui_h3.h3core.timing import Timings
from comfyui_h3.h3core.tiny.write import write_official
from comfyui_h3.h3core.types import Request

PROMPT = (
    "integrated_multimodal_description: [Shot 1] A fishing boat leaves a quiet harbour at dawn; the camera holds still."
    "\n\noverall_soundscape: Small waves and a distant engine.\n\nnon_diegetic_music: N/A"
)
FULL_SIZE_TEXT_ROWS = 494  # about what a prompt of a 10 s clip has
TINY_SIZE = {"width": 128, "height": 96, "frames": 22}
REAL_SIZE = {"width": 1344, "height": 768, "frames": 124}


def run_once(engine: Engine, request: Request, sigma_points: int, folder: Path) -> tuple[Timings, float]:
    """One job; the same stages, in the same order, as the shipped workflow. Their times, and that of the whole."""
    begin = time.perf_counter()
    latents = engine.sample(engine.encode(request), sigma_points=sigma_points)
    frames, audio = engine.decode_video(latents), engine.decode_audio(latents)
    timings = engine.save(frames, audio, folder / "clip.mp4").timings
    return timings, time.perf_counter() - begin


def figures(runs: list[tuple[Timings, float]]) -> dict[str, float]:
    """Median seconds of each stage but loading, of a whole job, of one forward, and the share that is unexplained."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for timings, wall in runs:
        stages = [stage for stage in timings.stages if not stage.name.startswith("load_")]
        loading = sum(stage.seconds for stage in timings.stages if stage.name.startswith("load_"))
        for stage in stages:
            seconds[f"seconds.{stage.name}"].append(stage.seconds)
            if stage.name == "sample":
                seconds["seconds.forward"].append(stage.seconds / stage.num_units)
        total = sum(stage.seconds for stage in stages)
        seconds["seconds.total"].append(wall - loading)
        seconds["share.unexplained"].append((wall - loading - total) / (wall - loading))
    return {name: statistics.median(values) for name, values in seconds.items()}


def text_of_length(engine: Engine, num_tokens: int) -> str:
    """A prompt of at least so many tokens, whatever the tokenizer."""
    text = PROMPT
    while engine.count_tokens(text) < num_tokens:
        text += " " + PROMPT
    return text


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.pipeline", description="Stage times of a text-to-video job.")
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--checkpoint", type=Path, help="folder that holds FL2VA/; default: the tiny H3")
    weights.add_argument("--full-size", action="store_true", help="random weights of the released sizes")
    parser.add_argument("--width", type=int)
    parser.add_argument("--height", type=int)
    parser.add_argument("--frames", type=int)
    parser.add_argument("--sigma-points", type=int, default=50, help="one more than forwards (default 50)")
    parser.add_argument("--runs", type=int, default=3, help="counted runs (default 3)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", choices=PRECISIONS, default="auto")
    parser.add_argument("--attention", choices=ATTENTIONS, default="auto")
    parser.add_argument("--name", default="pipeline", help="of the JSON (default pipeline)")
    parser.add_argument("--out", type=Path, help="folder of the JSON; default benchmarks/results")
    parser.add_argument("--commit", help="commit of a copy without git")
    args = parser.parse_args()
    if args.full_size and not torch.cuda.is_available():
        parser.error("the full-size model needs a CUDA device")
    size = REAL_SIZE if args.checkpoint or args.full_size else TINY_SIZE
    size = {name: getattr(args, name) or default for name, default in size.items()}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if args.checkpoint is None and not args.full_size:
            write_official(folder / "tiny-h3")
        config = EngineConfig(
            checkpoint=args.checkpoint or folder / "tiny-h3",
            device=args.device,
            precision=args.precision,
            attention=args.attention,
        )
        engine = Engine(config, full_size_checkpoints(config.checkpoint) if args.full_size else None)
        prompt = text_of_length(engine, FULL_SIZE_TEXT_ROWS) if args.full_size else PROMPT
        request = Request(prompt=prompt, width=size["width"], height=size["height"], num_frames=size["frames"])
        first = dataclasses.replace(request, prompt="A first job.", num_frames=22) if args.full_size else request
        run_once(engine, first, 3 if args.full_size else args.sigma_points, folder)
        runs = []
        for number in range(args.runs):  # a prompt of its own each: what was encoded before is not encoded again
            job = dataclasses.replace(request, prompt=f"{prompt} {number}")
            runs.append(run_once(engine, job, args.sigma_points, folder))
    measured = figures(runs)
    if engine.device.type == "cuda":
        measured["memory.peak_gib"] = torch.cuda.max_memory_allocated(engine.device) / 2**30
    shapes = {
        **size,
        "sigma_points": args.sigma_points,
        "runs": args.runs,
        "precision": engine.config.precision,
        "attention": engine.attention.name,
    }
    if engine.device.type == "cpu":
        shapes["cpu_threads"] = torch.get_num_threads()
    name = args.name if args.checkpoint or args.full_size else f"{args.name}_tiny"
    path = write_record(name, measured, shapes, device=engine.device, out=args.out, commit=args.commit)
    for figure, value in measured.items():
        print(f"{figure:24} {value:10.4f}")
    print(path)


if __name__ == "__main__":
    main()
