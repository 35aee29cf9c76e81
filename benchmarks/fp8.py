"""What 8 bits save and cost: seconds, memory and error of the full-size transformer with random weights.

    python _bootstrap.py benchmarks.fp8 --clip 10s

Takes a CUDA device with 8-bit products and 90 GiB. Errors are root mean squares relative to float32 (of one product,
over the rows that it gets in a bfloat16 forward) or to bfloat16 (of the velocities, after all layers). Those of the
released weights may differ: random ones have no outliers, and their attention is nearly flat.
"""

import argparse
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfyui_h3.benchmarks.forward import (
    CLIPS,
    HEIGHT,
    WIDTH,
    forward_seconds,
    random_modulation,
    random_weights,
)
from comfyui_h3.benchmarks.record import write_record
from comfyui_h3.h3core.accel.attention import choose_attention
from comfyui_h3.h3core.checkpoint.loader import build, num_bytes
from comfyui_h3.h3core.models.dit.config import DiTConfig
from comfyui_h3.h3core.models.dit.model import DiT
from comfyui_h3.h3core.models.fp8_linear import Fp8Linear, multiplies_fp8
from comfyui_h3.h3core.models.precision import exact_fp32
from comfyui_h3.h3core.request import resolve
from comfyui_h3.h3core.sampling.noise import Noise
from comfyui_h3.h3core.sampling.packing import pack
from comfyui_h3.h3core.sampling.sampler import sample
from comfyui_h3.h3core.sampling.schedule import Schedule
from comfyui_h3.h3core.sampling.steps import Steps
from comfyui_h3.h3core.types import Conditioning, Request

VARIANTS = {  # name -> dtype of the linears, attention
    "bf16": (torch.bfloat16, "auto"),
    "fp8": (torch.float8_e4m3fn, "auto"),
    "fp8_attention": (torch.bfloat16, "fa3_fp8"),
    "fp8_both": (torch.float8_e4m3fn, "fa3_fp8"),
}
ROW_STEP = 16  # every so many rows of a product are compared


def make_dit(variant: str, num_layers: int, device: torch.device) -> DiT:
    """The same random weights for every variant."""
    dtype, attention = VARIANTS[variant]
    config = DiTConfig(num_layers=num_layers)
    attend = choose_attention(attention, device, torch.bfloat16, config.attention_head_dim).attend
    return random_weights(build(lambda: DiT(config, attend), dtype), device)


def relative_rms(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def velocity(dit: DiT, clip: str, device: torch.device) -> Tensor:
    """Of all video values, in one forward from pure noise."""
    num_frames, num_text = CLIPS[clip]
    config = dit.config
    request, _ = resolve(Request(prompt=clip, width=WIDTH, height=HEIGHT, num_frames=num_frames))
    text = torch.randn(num_text, config.text_dim, generator=torch.Generator().manual_seed(1))
    conditioning = Conditioning(request=request, text=text, modality=torch.ones(num_text, dtype=torch.int32))
    noise = Noise.draw(request, 1, video_channels=config.latents_dim, audio_channels=config.audio_latents_dim)
    steps = Steps.of(pack(request, conditioning.modality), Schedule.uniform(2, 12.0, 3.0), exact=False)
    modulation = random_modulation(config, steps, dit.dtype, device)
    video, _ = sample(dit, modulation, conditioning, noise, steps, device)
    return video - noise.video  # one step from sigma 1 to 0 adds the velocity itself


@contextmanager
def compared_products(block: nn.Module, errors: dict[str, float]) -> Iterator[None]:
    """Within it a bfloat16 forward of ``block`` notes the errors of each of its linears, and of its form in 8 bits."""

    def compare(name: str, linear: nn.Linear, x: Tensor, out: Tensor) -> None:
        x, out = x[::ROW_STEP], out[::ROW_STEP]
        fp8 = Fp8Linear(linear.in_features, linear.out_features, bias=False).to(x.device)
        fp8.quantize(linear.weight)
        with exact_fp32():
            exact = F.linear(x.float(), linear.weight.float())
        errors[f"{name}.bf16_error"] = relative_rms(out, exact)
        errors[f"{name}.fp8_error"] = relative_rms(fp8(x), exact)

    hooks = [
        module.register_forward_hook(lambda linear, x, out, name=name: compare(name.split(".")[-1], linear, x[0], out))
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def error_figures(clip: str, num_layers: int, device: torch.device) -> dict[str, float]:
    """Errors of the products of the first block, and of the velocities of every variant after so many layers."""
    figures: dict[str, float] = {}
    dit = make_dit("bf16", num_layers, device)
    with compared_products(dit.blocks[0], figures):
        expected = velocity(dit, clip, device)
    del dit
    for variant in list(VARIANTS)[1:]:
        out = velocity(make_dit(variant, num_layers, device), clip, device)
        figures[f"{variant}.velocity_error_{num_layers}_layers"] = relative_rms(out, expected)
    return figures


def speed_figures(
    variant: str, clip: str, num_layers: int, num_forwards: int, device: torch.device
) -> dict[str, float]:
    dit = make_dit(variant, num_layers, device)
    torch.cuda.reset_peak_memory_stats(device)
    seconds, _ = forward_seconds(dit, clip, device, num_forwards)
    return {
        f"{variant}.forward_s": statistics.median(seconds),
        f"{variant}.weights_gib": num_bytes(dit) / 2**30,
        f"{variant}.peak_gib": torch.cuda.max_memory_allocated(device) / 2**30,
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.fp8", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clip", choices=list(CLIPS), default="10s")
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS), help="to be timed")
    parser.add_argument("--forwards", type=int, default=2, help="counted forwards, after one that is not (default 2)")
    parser.add_argument("--layers", type=int, default=50, help="fewer than 50 for a quick look")
    parser.add_argument("--error-layers", type=int, nargs="*", default=[1, 50], help="layers behind velocities (1 50)")
    parser.add_argument("--error-clip", choices=list(CLIPS), default="5s")
    parser.add_argument("--out", type=Path, help="folder of the JSON; default benchmarks/results")
    parser.add_argument("--commit", help="commit of a copy without git")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not multiplies_fp8(device):
        parser.error("this takes a CUDA device of compute capability 8.9 or newer")
    figures: dict[str, float] = {}
    for variant in args.variants:
        figures |= speed_figures(variant, args.clip, args.layers, args.forwards, device)
        torch.cuda.empty_cache()
    for num_layers in args.error_layers:
        figures |= error_figures(args.error_clip, num_layers, device)
    shapes = {
        "width": WIDTH,
        "height": HEIGHT,
        "clip": args.clip,
        "layers": args.layers,
        "forwards": args.forwards,
        "error_clip": args.error_clip,
        "error_layers": args.error_layers,
    }
    path = write_record("fp8", figures, shapes, device=device, out=args.out, commit=args.commit)
    for name, value in figures.items():
        print(f"{name:34} {value:10.4f}")
    print(path)


if __name__ == "__main__":
    main()
