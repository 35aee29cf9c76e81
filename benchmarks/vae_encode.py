"""Seconds, memory and exactness of the full-size video encoder at each precision, with random weights.

    python _bootstrap.py benchmarks.vae_encode

Takes a Hopper GPU (or later) with 16 GiB. A keyframe is one 1344x768 picture, a clip 124 frames of it (5 s). Errors are
those of the moments and of the latents before their rounding to float16, against float32, on a keyframe and on 22
frames; the share of float16 latents that differ is told beside them. The floor is the encoder's arithmetic, with three
products of halves or with one, at the rate of a float16 matrix product in the same run; the encoder goes below it, as
pairs of pixels save a third of the products. float32 takes a minute for a clip, and is timed with --float32. With
--diffusers the exact level is timed on two tiles of 17 frames beside diffusers' encoder, in float32 without TF32.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comfyui_h3.benchmarks.media import FULL_SIZE, random_weights
from comfyui_h3.benchmarks.record import write_record
from comfyui_h3.benchmarks.timing import wall_seconds
from comfyui_h3.h3core.checkpoint.diffusers_layout import video_vae_to_diffusers
from comfyui_h3.h3core.checkpoint.loader import build
from comfyui_h3.h3core.config import EncodePrecision
from comfyui_h3.h3core.models.precision import exact_fp32
from comfyui_h3.h3core.models.video_vae.config import VideoVAEConfig
from comfyui_h3.h3core.models.video_vae.encoder import (
    POSTERIOR_SEED,
    VideoEncoder,
    encode,
    encode_moments,
    normalize_pixels,
    sample_posterior,
)
from comfyui_h3.h3core.models.video_vae.tiling import TilePlan
from comfyui_h3.h3core.tiny import configs

HEIGHT, WIDTH = 768, 1344
MEDIA = {"keyframe": 1, "clip": 124}  # frames
COMPARED = {"keyframe": 1, "short_clip": 22}
PRECISIONS: dict[EncodePrecision, int] = {"split": 3, "half": 1}  # products of float16 numbers for one of float32
PLANES = {"split": 2, "half": 1}
FLOOR_SHAPE = (65_536, 256, 27 * 256)  # M, N, K: a convolution of the second level, as a matrix product


def tile_flops(config: VideoVAEConfig, num_frames: int) -> float:
    """Floating-point operations of the convolutions of one tile; those with the zero frames before it left out."""
    side, frames, before = config.tile_size, num_frames, config.ch
    total = _conv_flops(config.pixel_channels, config.ch, side, frames, frames)
    for level, mult in enumerate(config.ch_mult):
        width = config.ch * mult
        for block in range(config.num_res_blocks):
            total += _conv_flops(before if block == 0 else width, width, side, frames, frames)
            total += _conv_flops(width, width, side, frames, frames)
        if before != width:
            total += 2 * before * width * frames * side * side
        before = width
        if config.space_down[level] * config.time_down[level] > 1:
            read = frames
            frames = (frames - 1) // config.time_down[level] + 1
            side //= config.space_down[level]
            total += _conv_flops(width, width, side, frames, read)
    return total + _conv_flops(before, 2 * config.latent_channels, side, frames, frames)


def _conv_flops(num_in: int, num_out: int, side: int, frames: int, read: int) -> float:
    stride = 1 if frames == read else 2
    taps = sum(3 - max(0, 2 - frame * stride) for frame in range(frames))
    return 2.0 * 9 * taps * num_in * num_out * side * side


def media_flops(config: VideoVAEConfig, num_frames: int) -> float:
    unit = config.space_ratio
    num_tiles = TilePlan.cover(config, HEIGHT // unit, WIDTH // unit).num_tiles
    if num_frames == 1:
        return num_tiles * tile_flops(config, 1)
    full = -(-num_frames // config.clip_length) - 1
    return num_tiles * (full * tile_flops(config, config.clip_length) + tile_flops(config, config.last_clip_length))


def half_product_tflops(device: torch.device) -> float:
    rows, cols, depth = FLOOR_SHAPE
    a = torch.randn(rows, depth, device=device, dtype=torch.float16)
    b = torch.randn(cols, depth, device=device, dtype=torch.float16).T
    return 20 * 2 * rows * cols * depth / wall_seconds(lambda: [a @ b for _ in range(20)], 3) / 1e12


def unrounded_latents(moments: Tensor) -> Tensor:
    """The draw of ``sample_posterior`` before its rounding to float16."""
    mean, log_variance = moments.chunk(2)
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(POSTERIOR_SEED)).to(mean.device)
    return mean + torch.exp(0.5 * log_variance.clamp(-30, 20)) * noise


def diffusers_encode(encoder: VideoEncoder) -> Callable[[Tensor], Tensor]:
    """Moments of normalised pixels (3, F, H, W) by ``AutoencoderKLMiniMaxH3`` with the same weights."""
    from diffusers import AutoencoderKLMiniMaxH3

    with torch.device("meta"):
        vae: Any = AutoencoderKLMiniMaxH3()
    del vae.decoder, vae.post_quant_conv
    weights = video_vae_to_diffusers(encoder.state_dict(), encoder.config.num_heads, encoder.config.head_dim)
    vae.load_state_dict(weights, assign=True, strict=True)
    vae.enable_tiling()

    def moments(x: Tensor) -> Tensor:
        with exact_fp32():
            return vae.encode(x[None]).latent_dist.parameters[0]

    return moments


def errors(ours: Tensor, wanted: Tensor) -> dict[str, float]:
    """In units of 1e-6, the root mean square and the largest, relative to those of ``wanted``."""
    difference = ours.double() - wanted.double()
    return {
        "rms_e6": 1e6 * float(difference.norm() / wanted.double().norm()),
        "max_e6": 1e6 * float(difference.abs().max() / wanted.double().abs().max()),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.vae_encode", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--float32", action="store_true", help="time float32, too")
    parser.add_argument("--diffusers", action="store_true", help="time two tiles beside diffusers")
    parser.add_argument("--repeats", type=int, default=1, help="counted calls, after one that is not (default 1)")
    parser.add_argument("--out", type=Path, help="folder of the JSON; default benchmarks/results")
    parser.add_argument("--commit", help="commit of a copy without git")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("the full-size encoder needs a CUDA device")
    device = torch.device("cuda")
    config = VideoVAEConfig.from_dicts(configs.VIDEO_VAE, configs.VIDEO_VAE_SOURCE | FULL_SIZE)
    encoder = random_weights(build(lambda: VideoEncoder(config), torch.float32), device)
    pixels = torch.randint(0, 256, (3, MEDIA["clip"], HEIGHT, WIDTH), dtype=torch.uint8)
    rate = half_product_tflops(device)
    figures: dict[str, float] = {"floor.half_product_tflops": rate}
    for precision, planes in PLANES.items():
        before = torch.cuda.memory_allocated(device)
        encoder.split(planes)
        figures[f"weights.{precision}_gib"] = (torch.cuda.memory_allocated(device) - before) / 2**30
    for what, frames in COMPARED.items():
        wanted = encode_moments(encoder, pixels[:, :frames])
        for precision in PRECISIONS:
            moments = encode_moments(encoder, pixels[:, :frames], precision=precision)
            both = {"moments": (moments, wanted), "latents": (unrounded_latents(moments), unrounded_latents(wanted))}
            for name, (ours, theirs) in both.items():
                figures |= {f"{what}.{precision}_{name}_{key}": value for key, value in errors(ours, theirs).items()}
            flips = (sample_posterior(moments) != sample_posterior(wanted)).double().mean()
            figures[f"{what}.{precision}_flipped_share"] = float(flips)
            found = {key: f"{value:.4g}" for key, value in figures.items() if key.startswith(f"{what}.{precision}")}
            print(found, flush=True)
    for what, frames in MEDIA.items():
        flops = media_flops(config, frames)
        figures[f"{what}.pflop"] = flops / 1e15
        for precision, products in (*PRECISIONS.items(), *((("float32", 0),) if args.float32 else ())):
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            taken = wall_seconds(lambda: encode(encoder, pixels[:, :frames], precision=precision), args.repeats)  # noqa: B023
            figures[f"{what}.{precision}_s"] = taken
            figures[f"{what}.{precision}_gib"] = (torch.cuda.max_memory_allocated(device) - before) / 2**30
            if products:
                figures[f"{what}.{precision}_floor_s"] = products * flops / rate / 1e12
            found = {key: f"{value:.4g}" for key, value in figures.items() if key.startswith(f"{what}.{precision}")}
            print(found, flush=True)
    shapes = {**MEDIA, "height": HEIGHT, "width": WIDTH, "repeats": args.repeats}
    print(write_record("vae_encode", figures, shapes, device=device, out=args.out, commit=args.commit))
    if args.diffusers:
        two_tiles = pixels[:, : config.clip_length, : config.tile_size, : 2 * config.tile_size - config.tile_overlap]
        encode_with_diffusers, x = diffusers_encode(encoder), normalize_pixels(two_tiles.to(device))
        exact = encode_moments(encoder, two_tiles, exact=True)
        figures["two_tiles.exact_equals_diffusers"] = float(torch.equal(exact, encode_with_diffusers(x)))
        figures["two_tiles.exact_s"] = wall_seconds(lambda: encode_moments(encoder, two_tiles, exact=True), 3)
        figures["two_tiles.diffusers_s"] = wall_seconds(lambda: encode_with_diffusers(x), 3)
        print({key: value for key, value in figures.items() if key.startswith("two_tiles")}, flush=True)
        print(write_record("vae_encode", figures, shapes, device=device, out=args.out, commit=args.commit))


if __name__ == "__main__":
    main()
