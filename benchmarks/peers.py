"""One forward of the full-size transformer: ours, diffusers' and the floor in the same run, on the same inputs.

    python _bootstrap.py benchmarks.peers --clip 5s

Takes a CUDA device with 90 GiB, and diffusers. The floor is the four matrix products and the attention of a block on
the same shapes, times the number of blocks; see ``benchmarks.forward``. The order is ours, floor, diffusers, so that
the GPU is warm for all of them.

Errors are those of the velocities of a transformer of full width and few blocks, against diffusers with the same
weights in float32: of ours, and of diffusers in bfloat16.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comfyui_h3.benchmarks.forward import (
    CLIPS,
    HEIGHT,
    WIDTH,
    forward_seconds,
    products_ms,
    random_weights,
)
from comfyui_h3.benchmarks.record import write_record
from comfyui_h3.h3core.accel.attention import choose_attention
from comfyui_h3.h3core.checkpoint.diffusers_layout import dit_to_diffusers
from comfyui_h3.h3core.checkpoint.loader import build, materialize
from comfyui_h3.h3core.models.dit.adaln import Modulator
from comfyui_h3.h3core.models.dit.config import DiTConfig
from comfyui_h3.h3core.models.dit.model import DiT
from comfyui_h3.h3core.models.precision import exact_fp32
from comfyui_h3.h3core.request import resolve
from comfyui_h3.h3core.sampling.packing import PackedSequence, pack
from comfyui_h3.h3core.types import Request

NUM_COMPARED_LAYERS = 2
COMPARED_TIMES = (0.2, 0.45)  # of video and audio


def packed(clip: str) -> PackedSequence:
    num_frames, num_text = CLIPS[clip]
    request, _ = resolve(Request(prompt=clip, width=WIDTH, height=HEIGHT, num_frames=num_frames))
    return pack(request, torch.ones(num_text, dtype=torch.int32))


def inputs(clip: str, device: torch.device) -> dict[str, Tensor]:
    """What both implementations get: noisy rows, text states, timesteps, and which row has which."""
    sequence, config = packed(clip), DiTConfig()
    layout = sequence.layout
    timesteps, index = sequence.timestep_rows(*torch.tensor(COMPARED_TIMES))
    generator = torch.Generator(device).manual_seed(1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    tensors = {
        "video": noise(layout.num_video, config.patch_size),
        "audio": noise(layout.num_audio, config.audio_latents_dim),
        "text": noise(layout.num_text, config.text_dim),
        "timesteps": timesteps,
        "timestep_index": index,
        "modality": sequence.modality,
        "position_ids": sequence.position_ids,
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def ours_velocity(dit: DiT, modulator: Modulator, given: Mapping[str, Tensor]) -> Tensor:
    with exact_fp32():
        cos, sin = dit.rope(given["position_ids"], dit.dtype)
        modulation = modulator([given["timesteps"]])
        text = dit.embed_text(given["text"])
        index, modality = given["timestep_index"], given["modality"]
        return dit(text, given["audio"], given["video"], modulation, index, modality, cos, sin)[1]


def diffusers_velocity(model: Any, given: Mapping[str, Tensor]) -> Tensor:
    num_text, num_audio = len(given["text"]), len(given["audio"])
    rows = torch.arange(len(given["modality"]), device=given["text"].device)
    with exact_fp32():
        return model(
            hidden_states=given["video"][None],
            audio_hidden_states=given["audio"][None],
            encoder_hidden_states=given["text"][None].to(model.context_embedder.weight.dtype),
            timestep=given["timesteps"],
            timestep_indices=given["timestep_index"].long(),
            token_tags=given["modality"].long(),
            position_ids=given["position_ids"],
            video_indices=rows[num_text + num_audio :],
            audio_indices=rows[num_text : num_text + num_audio],
            text_indices=rows[:num_text],
            return_dict=False,
        )[0][0]


def new_diffusers(num_layers: int, dtype: torch.dtype, device: torch.device) -> Any:
    """diffusers' transformer in ``dtype``, its float32 islands aside, with the weights PyTorch starts layers with."""
    from diffusers import MiniMaxH3Transformer3DModel

    model: Any  # diffusers' types know no more of it than that it can be made
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = MiniMaxH3Transformer3DModel(num_layers=num_layers)
    finally:
        torch.set_default_dtype(torch.float32)
    for name in model._keep_in_fp32_modules:
        model.get_submodule(name).float()
    return model.eval().requires_grad_(False)


def diffusers_seconds(num_layers: int, clip: str, device: torch.device, num_forwards: int) -> list[float]:
    """Seconds of each forward after the first."""
    model, given = new_diffusers(num_layers, torch.bfloat16, device), inputs(clip, device)
    ends = []
    for _ in range(num_forwards + 1):
        diffusers_velocity(model, given)
        torch.cuda.synchronize(device)
        ends.append(time.perf_counter())
    return [end - start for start, end in itertools.pairwise(ends)]


def random_modulator(config: DiTConfig, dtype: torch.dtype, device: torch.device) -> Modulator:
    generator = torch.Generator(device).manual_seed(3)

    def value(name: str, like: Tensor) -> Tensor:
        out = torch.empty(like.shape, dtype=like.dtype, device=device)
        return out.normal_(0, 0.3 * like.shape[-1] ** -0.5, generator=generator)

    return materialize(build(lambda: Modulator(config), dtype), value)


def errors(clip: str, device: torch.device) -> dict[str, float]:
    """Velocities in bfloat16 against diffusers with the same weights in float32, root mean squares: ours, and its."""
    config = DiTConfig(num_layers=NUM_COMPARED_LAYERS)
    attention = choose_attention("auto", device, torch.bfloat16, config.attention_head_dim)
    dit = random_weights(build(lambda: DiT(config, attention.attend), torch.bfloat16), device)
    modulator, given = random_modulator(config, torch.bfloat16, device), inputs(clip, device)
    heads = (config.num_attention_heads, config.attention_head_dim)
    official = dit.state_dict() | modulator.state_dict()
    for name in [name for name in official if name.endswith("qkv_proj.weight")]:
        official[name] = official[name].unflatten(0, (3, *heads)).transpose(0, 1).flatten(0, 2)
    state = dit_to_diffusers(official, *heads)
    velocities = {"ours": ours_velocity(dit, modulator, given)}
    for name, dtype in (("diffusers", torch.bfloat16), ("float32", torch.float32)):
        model = new_diffusers(NUM_COMPARED_LAYERS, dtype, device)
        model.load_state_dict(state)
        velocities[name] = diffusers_velocity(model, given)
    exact = velocities.pop("float32").double()
    return {
        f"velocity.{name}_error": float((velocity.double() - exact).norm() / exact.norm())
        for name, velocity in velocities.items()
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clip", choices=[*CLIPS, "all"], default="all")
    parser.add_argument("--forwards", type=int, default=2, help="counted forwards, after one that is not (default 2)")
    parser.add_argument("--layers", type=int, default=50, help="fewer than 50 for a quick look")
    parser.add_argument("--out", type=Path, help="folder of the JSON; default benchmarks/results")
    parser.add_argument("--commit", help="commit of a copy without git")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("the full-size transformer needs a CUDA device")
    device, clips = torch.device("cuda"), list(CLIPS) if args.clip == "all" else [args.clip]
    config = DiTConfig(num_layers=args.layers)
    figures = errors(clips[0], device)
    torch.cuda.empty_cache()
    attention = choose_attention("auto", device, torch.bfloat16, config.attention_head_dim)
    dit = random_weights(build(lambda: DiT(config, attention.attend), torch.bfloat16), device)
    rows: dict[str, int] = {}
    for clip in clips:
        torch.cuda.reset_peak_memory_stats(device)
        ours, rows[clip] = forward_seconds(dit, clip, device, args.forwards)
        peak = torch.cuda.max_memory_allocated(device)
        floor = args.layers * sum(products_ms(dit, attention.attend, rows[clip], device)) / 1e3
        figures |= {
            f"{clip}.ours_s": statistics.median(ours),
            f"{clip}.floor_s": floor,
            f"{clip}.ours_over_floor": statistics.median(ours) / floor,
            f"{clip}.ours_peak_gib": peak / 2**30,
        }
    del dit
    torch.cuda.empty_cache()
    for clip in clips:
        torch.cuda.reset_peak_memory_stats(device)
        theirs = statistics.median(diffusers_seconds(args.layers, clip, device, args.forwards))
        figures |= {
            f"{clip}.diffusers_s": theirs,
            f"{clip}.diffusers_over_ours": theirs / figures[f"{clip}.ours_s"],
            f"{clip}.diffusers_peak_gib": torch.cuda.max_memory_allocated(device) / 2**30,
        }
        torch.cuda.empty_cache()
    shapes = {"width": WIDTH, "height": HEIGHT, "rows": rows, "layers": args.layers, "forwards": args.forwards}
    shapes |= {"attention": attention.name, "compared_layers": NUM_COMPARED_LAYERS}
    path = write_record("peers", figures, shapes, device=device, out=args.out, commit=args.commit)
    for name, value in figures.items():
        print(f"{name:34} {value:12.6f}")
    print(path)


if __name__ == "__main__":
    main()
