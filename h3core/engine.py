"""The engine: the only thing nodes talk to. It owns the weights of one checkpoint on one device."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comfyui_h3.h3core.checkpoint.official import Checkpoint
from comfyui_h3.h3core.config import EngineConfig
from comfyui_h3.h3core.errors import DeviceMemoryError, RequestError
from comfyui_h3.h3core.media.mp4 import write_mp4
from comfyui_h3.h3core.models.audio_vae import decoder as audio_vae
from comfyui_h3.h3core.models.text_encoder.template import Presenter
from comfyui_h3.h3core.models.video_vae import decoder as video_vae
from comfyui_h3.h3core.request import check_seed, check_sigma_points, resolve
from comfyui_h3.h3core.sampling.noise import Noise
from comfyui_h3.h3core.sampling.sampler import sample
from comfyui_h3.h3core.sampling.schedule import Schedule
from comfyui_h3.h3core.timing import StageTimer
from comfyui_h3.h3core.types import Audio, Conditioning, Frames, Latents, Mp4, Progress, Request
from comfyui_h3.kernels.dispatch import backend, triton_problem

log = logging.getLogger(__name__)

HEADROOM_BYTES = 12 << 30  # activations of a 15 s clip at 1344x768, and of one decoder tile, with room to spare


class Engine:
    """Runs the stages of H3: ``encode``, ``sample``, ``decode_video``, ``decode_audio``, ``save``.

    Making one reads configs and shard headers; weights are read when a stage first needs them and then stay, unless
    the device has no room for the next stage's. Stages may be called from any thread, one at a time; ``on_load`` counts
    the bytes of the weights a stage reads first.
    Raises CheckpointError when the checkpoint is incomplete or not H3.
    """

    def __init__(self, config: EngineConfig):
        self.config = config
        self.device = config.torch_device()
        self.dtype = config.torch_dtype()
        _check_kernels(config.kernels, self.device, self.dtype)
        self.checkpoint = Checkpoint.open(config.checkpoint, config.partition)
        self._lock = threading.Lock()
        self._leaving, self._parked = threading.Event(), threading.Event()
        self._modules: dict[str, Any] = {}
        self._presenter: Presenter | None = None
        log.info("%s", self.describe())

    def describe(self) -> str:
        """One line: which weights, how many, where and in which precision."""
        dit = self.checkpoint.dit_config
        return (
            f"MiniMax H3 {self.checkpoint.partition}: {dit.num_layers} blocks of {dit.hidden_size}, "
            f"{_count(self.checkpoint.transformer.entries) / 1e9:.3g} B weights, {self.device}, "
            f"{str(self.dtype).removeprefix('torch.')}"
        )

    @torch.no_grad()
    def encode(
        self, request: Request, *, on_progress: Progress | None = None, on_load: Progress | None = None
    ) -> Conditioning:
        """The prompt as the DiT reads it. All checks of the request come before any weight is read.

        Raises RequestError for an impossible request.
        """
        resolved = resolve(request)
        if self.checkpoint.partition != "fl2va":
            raise RequestError(
                "the ref2va weights need at least one reference; load the fl2va weights for a video from text alone"
            )
        with self._lock, self._memory_named("encoding"):
            if self._presenter is None:
                self._presenter = self.checkpoint.load_presenter()
            presentation = self._presenter.present(request.prompt)
            timer = StageTimer(self.device)
            report = self._watched(on_progress)
            report(0, 1)
            with timer.stage("load_text_encoder"):
                encoder = self._module("text_encoder", on_load)
            with timer.stage("encode", num_units=len(presentation.ids)):
                text = encoder(presentation).cpu()
            report(1, 1)
        log.info("encode: %d text rows", len(text))
        return Conditioning(request=resolved, text=text, modality=presentation.modality, timings=timer.timings)

    @torch.no_grad()
    def sample(
        self,
        conditioning: Conditioning,
        *,
        seed: int = 42,
        sigma_points: int = 50,
        noise: Noise | None = None,
        on_step: Progress | None = None,
        on_load: Progress | None = None,
    ) -> Latents:
        """Denoised latents after ``sigma_points - 1`` forwards. ``noise`` replaces the one drawn from ``seed``.

        Raises RequestError for a seed or a count that is not possible.
        """
        check_seed(seed)
        check_sigma_points(sigma_points)
        checkpoint = self.checkpoint
        dit_config = checkpoint.dit_config
        if conditioning.text.shape[1] != dit_config.text_dim:
            raise RequestError(
                f"the conditioning is {conditioning.text.shape[1]} wide, this transformer reads {dit_config.text_dim}; "
                "encode the prompt with the same Load H3"
            )
        schedule = Schedule.uniform(sigma_points, checkpoint.video_shift, checkpoint.audio_shift)
        noise = noise or Noise.draw(
            conditioning.request,
            seed,
            video_channels=dit_config.latents_dim,
            audio_channels=dit_config.audio_latents_dim,
        )
        timer = StageTimer(self.device)
        with self._lock, self._memory_named("sampling"), backend(self.config.kernels):
            with timer.stage("load_dit"):
                dit = self._module("dit", on_load)
            with timer.stage("sample", num_units=schedule.num_forwards):
                video, audio = sample(dit, conditioning, noise, schedule, self.device, self._watched(on_step))
        timings = conditioning.timings + timer.timings
        return Latents(request=conditioning.request, video=video, audio=audio, timings=timings)

    @torch.no_grad()
    def decode_video(
        self, latents: Latents, *, on_progress: Progress | None = None, on_load: Progress | None = None
    ) -> Frames:
        """Frames as uint8, rounded. Raises OutputError when the decoder gives values that are not finite."""
        timer = StageTimer(self.device)
        request = latents.request
        with self._lock, self._memory_named("decoding the video"):
            with timer.stage("load_video_decoder"):
                decoder = self._module("video_decoder", on_load)
            pixels = torch.empty(request.num_frames, request.height, request.width, 3, dtype=torch.uint8)
            with timer.stage("decode_video", num_units=request.num_frames):
                start = 0
                for part in video_vae.decode(decoder, latents.video, on_tile=self._watched(on_progress)):
                    stop = start + part.shape[1]
                    pixels[start:stop] = to_uint8(part)
                    start = stop
        return Frames(pixels=pixels, timings=latents.timings + timer.timings)

    @torch.no_grad()
    def video_parts(self, latents: Latents) -> Iterator[Tensor]:
        """The same frames before rounding: parts (3, F_i, H, W) float32 in [0, 1], in order."""
        with self._lock:
            yield from video_vae.decode(self._module("video_decoder"), latents.video)

    @torch.no_grad()
    def decode_audio(self, latents: Latents, *, on_load: Progress | None = None) -> Audio:
        """Stereo samples, float32 at 32 kHz. Raises OutputError when they are not finite."""
        timer = StageTimer(self.device)
        with self._lock, self._memory_named("decoding the audio"):
            with timer.stage("load_audio_decoder"):
                decoder = self._module("audio_decoder", on_load)
            with timer.stage("decode_audio"):
                samples = audio_vae.decode(decoder, latents.audio).cpu()
        return Audio(
            samples=samples,
            sample_rate=self.checkpoint.audio_vae_config.sample_rate,
            timings=latents.timings + timer.timings,
        )

    def save(
        self,
        frames: Frames,
        audio: Audio | None,
        path: Path,
        *,
        metadata: Mapping[str, str] | None = None,
        crf: int = 18,
        preset: str = "fast",
        on_progress: Progress | None = None,
    ) -> Mp4:
        """An MP4 at ``path``, complete or not there at all. Raises OutputError when it cannot be written."""
        return write_mp4(path, frames, audio, metadata=metadata, crf=crf, preset=preset, on_progress=on_progress)

    def unload(self) -> None:
        """Gives the memory of all weights back; the next stage reads its own again."""
        with self._lock:
            self._drop(list(self._modules))

    def park(self, timeout_s: float) -> None:
        """For a process that leaves: the running stage sleeps for ever from its next step, tile or tensor on.

        A daemon thread (the prompt thread of a host) that is inside PyTorch while the interpreter goes away aborts the
        process, and an exception would send it there again: hosts print tensors of failed nodes. Waits ``timeout_s``
        at most.
        """
        self._leaving.set()
        deadline = time.monotonic() + timeout_s
        while self._lock.locked() and not self._parked.wait(0.01) and time.monotonic() < deadline:
            pass

    def _watched(self, callback: Progress | None) -> Progress:
        """``callback`` in which a stage can be parked."""

        def report(done: int, total: int) -> None:
            if self._leaving.is_set():
                self._parked.set()
                threading.Event().wait()
            if callback is not None:
                callback(done, total)

        return report

    @contextmanager
    def _memory_named(self, stage: str) -> Iterator[None]:
        """Says which stage ran out of device memory, with how much free, and what helps."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self.device)
            held = ", ".join(f"{name} {_bytes(module) / 2**30:.1f}" for name, module in self._modules.items()) or "none"
            raise DeviceMemoryError(
                f"{stage} does not fit on {self.device}: {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free, "
                f"weights in GiB: {held}; use a smaller size or fewer frames, or free memory that others hold"
            ) from error

    def _module(self, name: str, on_load: Progress | None = None) -> Any:
        if name not in self._modules:
            load, num_bytes = self._loaders()[name]
            self._make_room(num_bytes)
            self._modules[name] = load(self._watched(on_load))
            log.info("%s: %.2f GiB of weights on %s", name, _bytes(self._modules[name]) / 2**30, self.device)
        return self._modules[name]

    def _loaders(self) -> dict[str, tuple[Callable[[Progress | None], nn.Module], int]]:
        """How each module is loaded, and the bytes that this reads."""
        checkpoint, device, dtype, vae_dtype = self.checkpoint, self.device, self.dtype, self.config.vae_dtype()
        return {
            "text_encoder": (
                lambda on_load: checkpoint.load_text_encoder(device, dtype, on_load),
                checkpoint.text_encoder.num_bytes,
            ),
            "dit": (
                lambda on_load: checkpoint.load_dit(device, dtype, on_load=on_load),
                checkpoint.transformer.num_bytes,
            ),
            "video_decoder": (
                lambda on_load: checkpoint.load_video_decoder(device, vae_dtype, on_load),
                checkpoint.video_decoder.num_bytes,
            ),
            "audio_decoder": (
                lambda on_load: checkpoint.load_audio_decoder(device, on_load),
                checkpoint.audio_decoder.num_bytes,
            ),
        }

    def _make_room(self, num_bytes: int) -> None:
        """Drops modules of other stages, the longest loaded first, until ``num_bytes`` and the headroom fit."""
        if self.device.type != "cuda":
            return
        for name in list(self._modules):
            torch.cuda.empty_cache()
            if torch.cuda.mem_get_info(self.device)[0] >= num_bytes + HEADROOM_BYTES:
                return
            log.warning("%s leaves %s: the next stage needs its memory", name, self.device)
            self._drop([name])

    def _drop(self, names: list[str]) -> None:
        for name in names:
            del self._modules[name]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _check_kernels(kernels: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raises RequestError when the kernels are insisted on and cannot run."""
    problem = triton_problem(device) or (f"the precision is {dtype}" if dtype != torch.bfloat16 else None)
    if kernels == "triton" and problem:
        raise RequestError(f"kernels=triton cannot run: {problem}; use kernels=auto, or bfloat16 on a CUDA device")


def to_uint8(part: Tensor) -> Tensor:
    """(3, F, H, W) float32 in [0, 1] -> (F, H, W, 3) uint8, halves rounded to even."""
    return (part * 255).round_().to(torch.uint8).movedim(0, -1)


def _count(entries: Mapping[str, Any]) -> int:
    return sum(entry.num_elements for entry in entries.values())


def _bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in module.state_dict().values())
