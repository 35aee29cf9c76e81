"""Seconds of decoding a full-size video with random weights, beside the decoder's products alone in the same run.

    python _bootstrap.py benchmarks.vae_decode --frames 124 243

Takes a CUDA device with 24 GiB. The time is from latents on the host to 8-bit frames on the host. The products are the
four matrix products and the attention of all blocks and the output projection, on the shapes of one batch of tiles and
by the same calls, times the number of tiles: what is left is everything else. They run for as long as a decode, as a
GPU at its power limit lowers its clock.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from comfyui_h3.benchmarks.record import write_record
from comfyui_h3.h3core.checkpoint.loader import build, materialize
from comfyui_h3.h3core.models.precision import exact_fp32
from comfyui_h3.h3core.models.video_vae.config import VideoVAEConfig
from comfyui_h3.h3core.models.video_vae.decoder import VideoDecoder, decode_frames, usual_tile_batch
from comfyui_h3.h3core.models.video_vae.tiling import ChunkPlan, TilePlan
from comfyui_h3.h3core.request import resolve
from comfyui_h3.h3core.tiny import configs
from comfyui_h3.h3core.types import Request
from comfyui_h3.kernels.dispatch import BACKENDS, backend
from comfyui_h3.kernels.split_linear import split_linear

WIDTH, HEIGHT = 1344, 768
NUM_BATCHES = 24  # of products: about 3 seconds on an H200
FULL_SIZE = {"heads": 32, "dim_head": 64, "num_layers": 36}


def full_size_config() -> VideoVAEConfig:
    vit = configs.VIDEO_VAE_SOURCE["vit_decoder_kwargs"] | FULL_SIZE
    return VideoVAEConfig.from_dicts(configs.VIDEO_VAE, configs.VIDEO_VAE_SOURCE | {"vit_decoder_kwargs": vit})


def random_weights(decoder: VideoDecoder, device: torch.device) -> VideoDecoder:
    """Every weight random, at the scale that keeps activations of unit size: with zeros, products cost less power."""
    generator = torch.Generator(device).manual_seed(0)

    def value(name: str, like: Tensor) -> Tensor:
        noise = torch.randn(like.shape, dtype=like.dtype, device=device, generator=generator)
        if "norm" in name and name.endswith("weight"):
            return 1 + 0.1 * noise
        if "scale" in name:
            return 0.5 + 0.1 * noise
        if name.endswith("weight"):
            return noise * like[0].numel() ** -0.5
        return 0.1 * noise

    return materialize(decoder, value)


def products_ms(decoder: VideoDecoder, num_tiles: int, num_tokens: int) -> tuple[float, float, float]:
    """Milliseconds a tile takes in the products and the attention of all blocks, and in the output projection."""
    config, device = decoder.config, decoder.device
    num_rows = num_tokens + config.num_register_tokens + 1
    wide = torch.randn(num_tiles, num_rows, config.hidden_size * config.ffn_mult, device=device)
    half = wide.to(decoder.compute_dtype)
    narrow = half[..., : config.hidden_size].contiguous()
    last = wide[..., : config.hidden_size].contiguous()
    qkv = torch.randn(num_tiles, num_rows, config.num_heads, 3, config.head_dim, device=device)
    q, k, v = F.rms_norm(qkv, qkv.shape[-1:]).to(decoder.compute_dtype).unbind(-2)
    q, k = q.contiguous(), k.contiguous()
    blocks: Any = decoder.decoder.transformer_blocks
    output = decoder.decoder.proj_out

    def matrix_products() -> None:
        for block in blocks:
            for linear in (block.attn.to_qkv, block.attn.to_out, block.ff.w1):
                F.linear(narrow, linear.weight, linear.bias)
            F.linear(half, block.ff.w2.weight, block.ff.w2.bias)

    def attention() -> None:
        for block in blocks:
            block.attn.attend(q, k, v)

    calls = (matrix_products, attention, lambda: split_linear(last, output.weight, output.bias))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(4)] for _ in range(NUM_BATCHES)]
    with exact_fp32():
        for batch in events:
            batch[0].record()
            for call, end in zip(calls, batch[1:], strict=True):
                call()
                end.record()
    torch.cuda.synchronize(device)
    warm = events[NUM_BATCHES // 2 :]
    matrix, attending, projection = (
        statistics.median(batch[i].elapsed_time(batch[i + 1]) for batch in warm) / num_tiles for i in range(3)
    )
    return matrix, attending, projection


def decode_seconds(decoder: VideoDecoder, latents: Tensor, num_frames: int, tile_batch: int | None) -> float:
    pixels = torch.empty(num_frames, HEIGHT, WIDTH, 3, dtype=torch.uint8)
    torch.cuda.synchronize(decoder.device)
    begin = time.perf_counter()
    start = 0
    for part in decode_frames(decoder, latents, tile_batch=tile_batch):
        stop = start + len(part)
        pixels[start:stop] = part
        start = stop
    assert start == num_frames
    return time.perf_counter() - begin


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.vae_decode", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--frames", type=int, nargs="+", default=[124, 243])
    parser.add_argument("--repeats", type=int, default=2, help="counted decodes, after a short one that is not (2)")
    parser.add_argument("--tile-batch", type=int, help="tiles decoded together; default what the device has room for")
    parser.add_argument("--kernels", choices=BACKENDS, default="auto")
    parser.add_argument("--out", type=Path, help="folder of the JSON; default benchmarks/results")
    parser.add_argument("--commit", help="commit of a copy without git")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("the full-size decoder needs a CUDA device")
    device = torch.device("cuda")
    config = full_size_config()
    empty = build(lambda: VideoDecoder(config), torch.float32).to_compute_dtype(torch.float16)
    decoder = random_weights(empty, device)
    tiles = TilePlan.cover(config, HEIGHT // config.space_ratio, WIDTH // config.space_ratio)
    window = ChunkPlan.cover(config, config.tokens_per_clip + config.token_overlap)
    num_tokens = window.size * tiles.rows.size * tiles.cols.size
    tile_batch = args.tile_batch or usual_tile_batch(decoder, num_tokens)
    figures: dict[str, float] = {}
    with backend(args.kernels):
        for frames in args.frames:
            request, _ = resolve(Request(prompt="any", width=WIDTH, height=HEIGHT, num_frames=frames))
            shape = (config.latent_channels, request.num_latent_frames, HEIGHT // 16, WIDTH // 16)
            latents = torch.randn(shape, generator=torch.Generator().manual_seed(1))
            num_tiles = tiles.num_tiles * ChunkPlan.cover(config, request.num_latent_frames).num_chunks
            decode_seconds(decoder, latents[:, : window.size], window.num_frames, tile_batch)
            torch.cuda.reset_peak_memory_stats(device)
            seconds = statistics.median(
                decode_seconds(decoder, latents, frames, tile_batch) for _ in range(args.repeats)
            )
            peak = torch.cuda.max_memory_allocated(device)
            matrix, attention, projection = products_ms(decoder, tile_batch, num_tokens)
            products = num_tiles * (matrix + attention + projection) / 1e3
            figures |= {
                f"{frames}_frames.decode_s": seconds,
                f"{frames}_frames.products_s": products,
                f"{frames}_frames.decode_over_products": seconds / products,
                f"{frames}_frames.ms_per_tile": 1e3 * seconds / num_tiles,
                f"{frames}_frames.matrix_products_ms_per_tile": matrix,
                f"{frames}_frames.attention_ms_per_tile": attention,
                f"{frames}_frames.output_projection_ms_per_tile": projection,
                f"{frames}_frames.peak_gib": peak / 2**30,
            }
    size = {"width": WIDTH, "height": HEIGHT, "frames": args.frames, "repeats": args.repeats}
    shapes = {**size, "tile_batch": tile_batch, "kernels": args.kernels, "dtype": "float16"}
    path = write_record("vae_decode", figures, shapes, device=device, out=args.out, commit=args.commit)
    for name, value in figures.items():
        print(f"{name:44} {value:10.3f}")
    print(path)


if __name__ == "__main__":
    main()
