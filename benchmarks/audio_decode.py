"""Milliseconds of decoding sound with the full-size audio VAE and random weights, beside its parts alone.

    python _bootstrap.py benchmarks.audio_decode --latents 405

405 latents are 10 s. The convolutions are those of one decode on their own, from a CUDA graph; the bytes are what its
operations read and write, each once, at the rate of a device copy: what is left over both is everything else. The
reference is the same decode in PyTorch, which is what runs where Triton is not.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from comfyui_h3.benchmarks.media import FULL_SIZE_SOUND
from comfyui_h3.benchmarks.ops import copy_tb_per_s, median_us
from comfyui_h3.benchmarks.record import write_record
from comfyui_h3.benchmarks.timing import wall_seconds
from comfyui_h3.h3core.checkpoint.loader import build, materialize
from comfyui_h3.h3core.models.audio_vae.config import AudioVAEConfig
from comfyui_h3.h3core.models.audio_vae.decoder import AudioDecoder, decode
from comfyui_h3.h3core.models.audio_vae.filters import AliasFreeSnakeBeta, kaiser_sinc_filter
from comfyui_h3.h3core.models.audio_vae.vocoder import Conv
from comfyui_h3.h3core.models.audio_vae.weight_norm import WeightNormConvTranspose1d
from comfyui_h3.h3core.models.precision import exact_fp32
from comfyui_h3.h3core.tiny import configs
from comfyui_h3.kernels.dispatch import backend

Calls = list[tuple[nn.Module, tuple[Tensor, ...]]]


def random_decoder(device: torch.device) -> AudioDecoder:
    """Every weight random, at the scale that keeps the sound inside [-1, 1], where the clamp does nothing."""
    kwargs = configs.AUDIO_VAE_METADATA["metadata"]["kwargs"] | FULL_SIZE_SOUND
    config = AudioVAEConfig.from_dicts(configs.AUDIO_VAE, {"metadata": {"kwargs": kwargs}})
    generator = torch.Generator(device).manual_seed(0)

    def value(name: str, like: Tensor) -> Tensor:
        noise = torch.randn(like.shape, device=device, generator=generator)
        if name.endswith("filter"):
            return kaiser_sinc_filter().to(device)
        if name.endswith("original0"):  # lengths of weights with norm
            return 0.72 + 0.1 * noise
        if like.ndim == 3:
            return noise / like[0].numel() ** 0.5
        return (0.03 if name.endswith("bias") else 0.1) * noise

    decoder = materialize(build(lambda: AudioDecoder(config), torch.float32), value)
    decoder.fold_weight_norm()
    return decoder


def calls_of(decoder: AudioDecoder, latents: Tensor) -> tuple[Calls, int]:
    """The convolutions of one decode with their inputs, and the bytes that all operations read and write."""
    convolutions: Calls = []
    num_bytes = 0

    def note(module: nn.Module, inputs: tuple[Tensor, ...], options: dict[str, Tensor], out: Tensor) -> None:
        nonlocal num_bytes
        read = (*inputs, *(value for value in options.values() if isinstance(value, Tensor)), *module.parameters())
        num_bytes += sum(tensor.nbytes for tensor in read) + out.nbytes
        if not isinstance(module, AliasFreeSnakeBeta):
            convolutions.append((module, inputs))

    hooks = [
        module.register_forward_hook(note, with_kwargs=True)
        for module in decoder.modules()
        if isinstance(module, (Conv, WeightNormConvTranspose1d, AliasFreeSnakeBeta))
    ]
    decode(decoder, latents)
    for hook in hooks:
        hook.remove()
    return convolutions, num_bytes


def graph_ms(calls: Calls, repeats: int) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for module, inputs in calls:
            module(*inputs)
    graph.replay()
    return median_us(graph.replay, repeats) / 1e3


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.audio_decode", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--latents", type=int, default=405, help="40 a second (default 405, 10 s)")
    parser.add_argument("--repeats", type=int, default=9, help="counted calls, after one that is not (default 9)")
    parser.add_argument("--out", type=Path, help="folder of the JSON; default benchmarks/results")
    parser.add_argument("--commit", help="commit of a copy without git")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("the full-size decoder needs a CUDA device")
    device = torch.device("cuda")
    decoder = random_decoder(device)
    latents = torch.randn(2, 32, args.latents, generator=torch.Generator().manual_seed(1))
    figures: dict[str, float] = {}
    sound: dict[str, Tensor] = {}
    for name in ("torch", "triton"):
        with backend(name):
            sound[name] = decode(decoder, latents)
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            figures[f"{name}.decode_ms"] = 1e3 * wall_seconds(lambda: decode(decoder, latents), args.repeats)
            figures[f"{name}.activations_gib"] = (torch.cuda.max_memory_allocated(device) - before) / 2**30
            convolutions, num_bytes = calls_of(decoder, latents)
            with exact_fp32():
                figures[f"{name}.convolutions_ms"] = graph_ms(convolutions, args.repeats)
    with backend("triton"):
        same = torch.equal(decode(decoder, latents), sound["triton"])
    if not same:
        raise SystemExit("two decodes of the same latents differ")
    with backend("torch"):
        double = decoder.double()
        config = decoder.config
        mean, std = (latents.new_tensor(values)[:, None] for values in (config.latents_mean, config.latents_std))
        exact = double((latents * std + mean).double().to(device))[:, 0]
    figures["bytes.floor_ms"] = num_bytes / copy_tb_per_s(args.repeats, device) / 1e9
    figures["sound.largest"] = sound["triton"].abs().max().item()
    for name, samples in sound.items():
        figures[f"{name}.error_1e-6"] = 1e6 * ((samples - exact).square().mean().sqrt() / exact.std()).item()
    for name, value in figures.items():
        print(f"{name:28} {value:10.3f}")
    shapes = {"latents": args.latents, "channels": 2, "repeats": args.repeats}
    print(write_record("audio_decode", figures, shapes, device=device, out=args.out, commit=args.commit))


if __name__ == "__main__":
    main()
