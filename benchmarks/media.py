"""Seconds and memory of encoding media with the full-size VAEs in float32, with random weights.

    python _bootstrap.py benchmarks.media --what keyframe clip

Takes a CUDA device with 16 GiB. A keyframe is one 1344x768 picture, a reference picture one of 3648x2048, a clip 124
frames of 1344x768 (5 s), a sound 5 s of stereo. ``benchmarks.vae_encode`` has the same on tensor cores.
"""

import argparse
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from comfyui_h3.benchmarks.record import write_record
from comfyui_h3.benchmarks.timing import wall_seconds
from comfyui_h3.h3core.checkpoint.loader import build, materialize
from comfyui_h3.h3core.models.audio_vae import encoder as audio_encoder
from comfyui_h3.h3core.models.audio_vae.config import AudioVAEConfig
from comfyui_h3.h3core.models.video_vae import encoder as video_encoder
from comfyui_h3.h3core.models.video_vae.config import VideoVAEConfig
from comfyui_h3.h3core.tiny import configs

M = TypeVar("M", bound=nn.Module)

PICTURES = {"keyframe": (1, 768, 1344), "picture": (1, 2048, 3648), "clip": (124, 768, 1344)}  # F, H, W
SOUND_S = 5.175
FULL_SIZE = {"ch": 128, "ch_mult": [1, 2, 2, 4, 4, 8], "num_res_blocks": 2}
FULL_SIZE_SOUND = {"encoder_dim": 64, "latent_dim": 2048, "decoder_dim": 1024}


def random_weights(module: M, device: torch.device) -> M:
    """Weights at the scale that keeps activations of unit size; norms 1, biases 0."""
    generator = torch.Generator(device).manual_seed(0)

    def value(name: str, like: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(like.shape, dtype=like.dtype, device=device)
        if "norm" in name and name.endswith("weight"):
            return out.fill_(1)
        if name.endswith("alpha") or name.endswith("original0"):
            return out.fill_(1)
        return out.normal_(0, like[0].numel() ** -0.5, generator=generator) if like.ndim > 1 else out

    return materialize(module, value)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.media", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--what", nargs="+", choices=[*PICTURES, "sound"], default=[*PICTURES, "sound"])
    parser.add_argument("--repeats", type=int, default=1, help="counted calls, after one that is not (default 1)")
    parser.add_argument("--out", type=Path, help="folder of the JSON; default benchmarks/results")
    parser.add_argument("--commit", help="commit of a copy without git")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("the full-size encoders need a CUDA device")
    device = torch.device("cuda")
    config = VideoVAEConfig.from_dicts(configs.VIDEO_VAE, configs.VIDEO_VAE_SOURCE | FULL_SIZE)
    encoder = random_weights(build(lambda: video_encoder.VideoEncoder(config), torch.float32), device)
    figures: dict[str, float] = {}
    for what in args.what:
        if what == "sound":
            continue
        pixels = torch.randint(0, 256, (3, *PICTURES[what]), dtype=torch.uint8)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        figures[f"{what}.encode_s"] = wall_seconds(lambda: video_encoder.encode(encoder, pixels), args.repeats)  # noqa: B023
        figures[f"{what}.activations_gib"] = (torch.cuda.max_memory_allocated(device) - before) / 2**30
        print(what, f"{figures[f'{what}.encode_s']:.3f} s, {figures[f'{what}.activations_gib']:.2f} GiB", flush=True)
    if "sound" in args.what:
        kwargs = configs.AUDIO_VAE_METADATA["metadata"]["kwargs"] | FULL_SIZE_SOUND
        sound_config = AudioVAEConfig.from_dicts(configs.AUDIO_VAE, {"metadata": {"kwargs": kwargs}})
        model = random_weights(build(lambda: audio_encoder.AudioEncoder(sound_config), torch.float32), device)
        model.fold_weight_norm()
        samples = 0.1 * torch.randn(2, round(SOUND_S * 32000))
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        figures["sound.encode_s"] = wall_seconds(lambda: audio_encoder.encode(model, samples), args.repeats)
        figures["sound.activations_gib"] = (torch.cuda.max_memory_allocated(device) - before) / 2**30
        print("sound", f"{figures['sound.encode_s']:.3f} s")
    shapes = {**PICTURES, "sound_s": SOUND_S, "repeats": args.repeats}
    path = write_record("media", figures, shapes, device=device, out=args.out, commit=args.commit)
    print(path)


if __name__ == "__main__":
    main()
