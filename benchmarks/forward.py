"""Seconds of one forward of the full-size transformer with random weights, beside its products alone in the same run.

    python _bootstrap.py benchmarks.forward --clip 5s

Takes a CUDA device with 70 GiB. The products are the four matrix products and the attention of a block, on the same
shapes and by the same PyTorch calls, times the number of blocks: what is left is everything else.
"""

import argparse
import itertools
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from comfyui_h3.benchmarks.record import write_record
from comfyui_h3.benchmarks.timing import gpu_ms
from comfyui_h3.h3core.accel.attention import ATTENTIONS, choose_attention
from comfyui_h3.h3core.checkpoint.loader import build, materialize
from comfyui_h3.h3core.models.dit.adaln import Modulation
from comfyui_h3.h3core.models.dit.attention import AttentionFn
from comfyui_h3.h3core.models.dit.config import DiTConfig
from comfyui_h3.h3core.models.dit.model import DiT
from comfyui_h3.h3core.request import resolve
from comfyui_h3.h3core.sampling.noise import Noise
from comfyui_h3.h3core.sampling.packing import pack
from comfyui_h3.h3core.sampling.sampler import sample
from comfyui_h3.h3core.sampling.schedule import Schedule
from comfyui_h3.h3core.sampling.steps import Steps
from comfyui_h3.h3core.types import Conditioning, Request
from comfyui_h3.kernels.dispatch import BACKENDS, backend

CLIPS = {"5s": (124, 66), "10s": (243, 494)}  # frames and text rows: 37,776 and 73,880 rows in all
WIDTH, HEIGHT = 1344, 768


def random_weights(dit: DiT, device: torch.device) -> DiT:
    """Every weight normal, at the scale that keeps a stream of unit rows of unit size; norms 1, biases 0."""
    generator = torch.Generator(device).manual_seed(0)

    def value(name: str, like: Tensor) -> Tensor:
        out = torch.zeros(like.shape, dtype=like.dtype, device=device)
        if name == "rope.inv_freq":
            return out.copy_(10000.0 ** (-torch.arange(len(out), device=device) / len(out)))
        if "norm" in name:
            return out.fill_(1)
        return out.normal_(0, like.shape[1] ** -0.5, generator=generator) if like.ndim == 2 else out

    return materialize(dit, value)


def random_modulation(config: DiTConfig, steps: Steps, dtype: torch.dtype, device: torch.device) -> Modulation:
    """Tables of the shapes of ``steps``, small, so that the stream stays near unit size."""
    generator = torch.Generator(device).manual_seed(2)
    num_rows = steps.num_timesteps
    blocks = torch.empty(config.num_layers, 3 * num_rows, 6, config.hidden_size, dtype=dtype, device=device)
    final = torch.empty(num_rows, 2, config.hidden_size, dtype=dtype, device=device)
    return Modulation(
        blocks=blocks.normal_(0, 0.1, generator=generator), final=final.normal_(0, 0.1, generator=generator)
    )


def forward_seconds(dit: DiT, clip: str, device: torch.device, num_forwards: int) -> tuple[list[float], int]:
    """Seconds of each forward after the first, and the rows of the sequence."""
    num_frames, num_text = CLIPS[clip]
    request, _ = resolve(Request(prompt=clip, width=WIDTH, height=HEIGHT, num_frames=num_frames))
    config = dit.config
    conditioning = Conditioning(
        request=request,
        text=torch.randn(num_text, config.text_dim, generator=torch.Generator().manual_seed(1)),
        modality=torch.ones(num_text, dtype=torch.int32),
    )
    noise = Noise.draw(request, 1, video_channels=config.latents_dim, audio_channels=config.audio_latents_dim)
    ends: list[float] = []

    def on_step(done: int, total: int) -> None:
        torch.cuda.synchronize(device)
        ends.append(time.perf_counter())

    sequence = pack(request, conditioning.modality)
    steps = Steps.of(sequence, Schedule.uniform(num_forwards + 2, 12.0, 3.0), exact=False)
    modulation = random_modulation(config, steps, dit.dtype, device)
    sample(dit, modulation, conditioning, noise, steps, device, on_step)
    seconds = [end - start for start, end in itertools.pairwise(ends[1:])]
    return seconds, sequence.layout.num_rows


def products_ms(dit: DiT, attend: AttentionFn, num_rows: int, device: torch.device) -> tuple[float, float]:
    """Milliseconds of the four matrix products, and of the attention, of one block."""
    config = dit.config
    block = dict(dit.blocks[0].named_parameters())
    wide = torch.randn(num_rows, 2 * config.ffn_hidden_size, device=device, dtype=dit.dtype)
    weights = [block[f"{name}.weight"] for name in ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")]

    def matrix_products() -> None:
        for weight in weights:
            F.linear(wide[:, : weight.shape[1]], weight)

    heads = (num_rows, config.num_attention_heads, config.attention_head_dim)
    q, k, v = (torch.randn(heads, device=device, dtype=dit.dtype) for _ in range(3))
    return gpu_ms(matrix_products), gpu_ms(lambda: attend(q, k, v))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.forward", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clip", choices=[*CLIPS, "all"], default="all")
    parser.add_argument("--forwards", type=int, default=3, help="counted forwards, after one that is not (default 3)")
    parser.add_argument("--kernels", choices=BACKENDS, default="auto")
    parser.add_argument("--attention", choices=ATTENTIONS, default="auto")
    parser.add_argument("--layers", type=int, default=50, help="fewer than 50 for a quick look")
    parser.add_argument("--out", type=Path, help="folder of the JSON; default benchmarks/results")
    parser.add_argument("--commit", help="commit of a copy without git")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("the full-size transformer needs a CUDA device")
    device = torch.device("cuda")
    config = DiTConfig(num_layers=args.layers)
    attention = choose_attention(args.attention, device, torch.bfloat16, config.attention_head_dim)
    dit = random_weights(build(lambda: DiT(config, attention.attend), torch.bfloat16), device)
    figures: dict[str, float] = {}
    rows: dict[str, int] = {}
    with backend(args.kernels):
        for clip in CLIPS if args.clip == "all" else (args.clip,):
            torch.cuda.reset_peak_memory_stats(device)
            seconds, rows[clip] = forward_seconds(dit, clip, device, args.forwards)
            peak = torch.cuda.max_memory_allocated(device)
            matrix, attending = products_ms(dit, attention.attend, rows[clip], device)
            products = args.layers * (matrix + attending) / 1e3
            forward = statistics.median(seconds)
            figures |= {
                f"{clip}.forward_s": forward,
                f"{clip}.products_s": products,
                f"{clip}.forward_over_products": forward / products,
                f"{clip}.matrix_products_ms_per_block": matrix,
                f"{clip}.attention_ms_per_block": attending,
                f"{clip}.peak_gib": peak / 2**30,
            }
    size = {"width": WIDTH, "height": HEIGHT}
    run = {"layers": args.layers, "forwards": args.forwards, "kernels": args.kernels, "attention": attention.name}
    shapes = {**size, "rows": rows, **run}
    path = write_record("forward", figures, shapes, device=device, out=args.out, commit=args.commit)
    for name, value in figures.items():
        print(f"{name:34} {value:10.3f}")
    print(path)


if __name__ == "__main__":
    main()
