"""The engine: the only thing nodes talk to. It owns the weights of one checkpoint on one device."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comfyui_h3.h3core.checkpoint.official import Checkpoint
from comfyui_h3.h3core.config import EngineConfig
from comfyui_h3.h3core.errors import OutputError, RequestError
from comfyui_h3.h3core.media.frames import to_uint8
from comfyui_h3.h3core.media.mp4 import write_mp4
from comfyui_h3.h3core.models.audio_vae import decoder as audio_vae
from comfyui_h3.h3core.models.precision import exact_fp32
from comfyui_h3.h3core.models.text_encoder.template import Presentation, Presenter
from comfyui_h3.h3core.models.video_vae import decoder as video_vae
from comfyui_h3.h3core.parking import PARKING
from comfyui_h3.h3core.request import check_seed, check_sigma_points, resolve
from comfyui_h3.h3core.residency import Residency, Source, available_host_bytes
from comfyui_h3.h3core.sampling.noise import Noise
from comfyui_h3.h3core.sampling.packing import text_to_video_layout
from comfyui_h3.h3core.sampling.sampler import sample
from comfyui_h3.h3core.sampling.schedule import Schedule
from comfyui_h3.h3core.timing import StageTimer
from comfyui_h3.h3core.types import Audio, Conditioning, Frames, Latents, Mp4, Progress, Request, ResolvedRequest
from comfyui_h3.kernels.dispatch import backend, triton_problem

log = logging.getLogger(__name__)

# Activations, weights aside. Upper bounds at the sizes of the release; the tiny model needs less.
ENCODE_BYTES_PER_ROW = 256 << 10
USUAL_TEXT_ROWS = 1000
DECODE_TILE_BYTES = 1 << 30
DECODE_AUDIO_BYTES = 1 << 30


class Engine:
    """Runs the stages of H3: ``encode``, ``sample``, ``decode_video``, ``decode_audio``, ``save``.

    Making one reads configs and shard headers; weights are read when a stage first needs them and then stay, unless
    the device has no room for the next stage's. Stages may be called from any thread, one at a time; ``on_load`` counts
    the bytes of the weights a stage reads first.
    Raises CheckpointError when the checkpoint is incomplete or not H3.
    """

    def __init__(self, config: EngineConfig):
        self.config = config
        self.device = config.torch_device
        self.dtype = config.torch_dtype
        _check_kernels(config.kernels, self.device, self.dtype)
        self.checkpoint = Checkpoint.open(config.checkpoint, config.partition)
        self._weights = Residency(self.device, _sources(self.checkpoint, config))
        self._lock = threading.RLock()  # a callback may ask for another stage
        self._presenter: Presenter | None = None
        log.info("%s", self.describe())

    def describe(self) -> str:
        """One line: which weights, how many, where and in which precision."""
        dit = self.checkpoint.dit_config
        num_weights = sum(entry.num_elements for entry in self.checkpoint.transformer.entries.values())
        return (
            f"MiniMax H3 {self.checkpoint.partition}: {dit.num_layers} blocks of {dit.hidden_size}, "
            f"{_count(num_weights)} weights, {self.device}, "
            f"{str(self.dtype).removeprefix('torch.')}"
        )

    @torch.no_grad()
    def encode(
        self, request: Request, *, on_progress: Progress | None = None, on_load: Progress | None = None
    ) -> Conditioning:
        """The prompt as the DiT reads it. All checks of the request come before any weight is read.

        ``on_progress`` counts the layers.

        Raises RequestError for an impossible request, one that the memory of this machine cannot hold among them.
        """
        resolved = resolve(request)
        if self.checkpoint.partition != "fl2va":
            raise RequestError(
                "the ref2va weights need at least one reference; load the fl2va weights for a video from text alone"
            )
        self._check_host_memory(resolved)
        with self._lock, PARKING.stage(), self._weights.explained("encoding"):
            if self._presenter is None:
                self._presenter = self.checkpoint.load_presenter()
            presentation = self._presenter.present(request.prompt)
            timer = StageTimer(self.device)
            with timer.stage("load_text_encoder"):
                encoder = self._module("text_encoder", _encode_bytes(presentation), on_load)
            with timer.stage("encode", num_units=len(presentation.ids)), exact_fp32():
                text = encoder(presentation, PARKING.watched(on_progress)).cpu()
            if not torch.isfinite(text.sum()):
                raise OutputError("the text encoder gave states that are not finite; its weights may be damaged")
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
        with self._lock, PARKING.stage(), self._weights.explained("sampling"), backend(self.config.kernels):
            with timer.stage("load_dit"):
                dit = self._module("dit", self._sample_bytes(len(conditioning.text), conditioning.request), on_load)
            with timer.stage("sample", num_units=schedule.num_forwards):
                video, audio = sample(dit, conditioning, noise, schedule, self.device, PARKING.watched(on_step))
        timings = conditioning.timings + timer.timings
        return Latents(request=conditioning.request, video=video, audio=audio, timings=timings)

    @torch.no_grad()
    def decode_video(
        self, latents: Latents, *, on_progress: Progress | None = None, on_load: Progress | None = None
    ) -> Frames:
        """Frames as uint8, rounded. Raises OutputError when the decoder gives values that are not finite."""
        timer = StageTimer(self.device)
        request = latents.request
        with self._lock, PARKING.stage(), self._weights.explained("decoding the video"):
            with timer.stage("load_video_decoder"):
                decoder = self._module("video_decoder", _decode_video_bytes(request), on_load)
            pixels = torch.empty(request.num_frames, request.height, request.width, 3, dtype=torch.uint8)
            with timer.stage("decode_video", num_units=request.num_frames):
                start = 0
                for part in video_vae.decode(decoder, latents.video, on_tile=PARKING.watched(on_progress)):
                    stop = start + part.shape[1]
                    pixels[start:stop] = to_uint8(part).movedim(0, -1)
                    start = stop
            assert start == request.num_frames, f"decoded {start} of {request.num_frames} frames"
        return Frames(pixels=pixels, timings=latents.timings + timer.timings)

    @torch.no_grad()
    def video_parts(self, latents: Latents) -> Iterator[Tensor]:
        """The same frames before rounding: parts (3, F_i, H, W) float32 in [0, 1], in order."""
        with self._lock:
            decoder = self._module("video_decoder", _decode_video_bytes(latents.request), None)
            yield from video_vae.decode(decoder, latents.video)

    @torch.no_grad()
    def decode_audio(self, latents: Latents, *, on_load: Progress | None = None) -> Audio:
        """Stereo samples, float32 at 32 kHz. Raises OutputError when they are not finite."""
        timer = StageTimer(self.device)
        with self._lock, PARKING.stage(), self._weights.explained("decoding the audio"):
            with timer.stage("load_audio_decoder"):
                decoder = self._module("audio_decoder", DECODE_AUDIO_BYTES, on_load)
            with timer.stage("decode_audio"):
                samples = audio_vae.decode(decoder, latents.audio).cpu()
        return Audio(
            samples=samples,
            sample_rate=self.checkpoint.audio_vae_config.sample_rate,
            timings=latents.timings + timer.timings,
        )

    def save(self, frames: Frames, audio: Audio | None, path: Path, **options: Any) -> Mp4:
        """An MP4 at ``path``, complete or not there at all; options and errors are those of ``write_mp4``."""
        return write_mp4(path, frames, audio, **options)

    def missing_bytes(self, stage: str, request: ResolvedRequest | None = None) -> int:
        """Device memory that "encode", "sample", "decode_video" or "decode_audio" would still take; 0 on a CPU.

        For a host with models of its own there, to make room before the call. The prompt counts as a usual one; stages
        whose memory depends on the size want the ``request`` of their conditioning or latents.
        """
        if self.device.type == "cpu":
            return 0
        if stage == "encode":
            return self._weights.missing_bytes("text_encoder", USUAL_TEXT_ROWS * ENCODE_BYTES_PER_ROW)
        if stage == "sample" and request is not None:
            return self._weights.missing_bytes("dit", self._sample_bytes(USUAL_TEXT_ROWS, request))
        if stage == "decode_video" and request is not None:
            return self._weights.missing_bytes("video_decoder", _decode_video_bytes(request))
        if stage == "decode_audio":
            return self._weights.missing_bytes("audio_decoder", DECODE_AUDIO_BYTES)
        raise ValueError(f"there is no stage {stage!r} without a request")

    def unload(self) -> None:
        """Gives the memory of all weights back; the next stage reads its own again."""
        with self._lock:
            self._weights.clear()

    def _module(self, name: str, working_bytes: int, on_load: Progress | None) -> Any:
        return self._weights.get(name, working_bytes, PARKING.watched(on_load))

    def _check_host_memory(self, request: ResolvedRequest) -> None:
        """Raises RequestError when frames, and on a CPU activations, of this size cannot be held."""
        needed = request.num_frames * request.height * request.width * 3
        if self.device.type == "cpu":
            needed = max(needed, self._sample_bytes(USUAL_TEXT_ROWS, request))
        available = available_host_bytes()
        if available is not None and needed > available:
            raise RequestError(
                f"{request.num_frames} frames of {request.width}x{request.height} need about {needed / 2**30:.0f} GiB "
                f"of memory, {available / 2**30:.0f} GiB are available; use fewer frames or a smaller size"
            )

    def _sample_bytes(self, num_text: int, request: ResolvedRequest) -> int:
        num_rows = text_to_video_layout(request, num_text).num_rows
        return num_rows * self.checkpoint.dit_config.bytes_per_row(self.dtype.itemsize)


def _sources(checkpoint: Checkpoint, config: EngineConfig) -> dict[str, Source]:
    device, dtype, vae_dtype = config.torch_device, config.torch_dtype, config.vae_dtype
    return {
        "text_encoder": Source(
            build=lambda: checkpoint.new_text_encoder(dtype),
            load=lambda on_load: checkpoint.load_text_encoder(device, dtype, on_load),
        ),
        "dit": Source(
            build=lambda: checkpoint.new_dit(dtype), load=lambda on_load: checkpoint.load_dit(device, dtype, on_load)
        ),
        "video_decoder": Source(
            build=lambda: checkpoint.new_video_decoder(vae_dtype),
            load=lambda on_load: checkpoint.load_video_decoder(device, vae_dtype, on_load),
        ),
        "audio_decoder": Source(
            build=checkpoint.new_audio_decoder, load=lambda on_load: checkpoint.load_audio_decoder(device, on_load)
        ),
    }


def _encode_bytes(presentation: Presentation) -> int:
    return len(presentation.ids) * ENCODE_BYTES_PER_ROW


def _decode_video_bytes(request: ResolvedRequest) -> int:
    """Activations of one tile, and three canvases of one time window (28 frames) in float32."""
    return DECODE_TILE_BYTES + 3 * 28 * 3 * 4 * request.height * request.width


def _count(number: int) -> str:
    return f"{number / 1e9:.1f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"


def _check_kernels(kernels: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raises RequestError when the kernels are insisted on and cannot run."""
    problem = triton_problem(device) or (f"the precision is {dtype}" if dtype != torch.bfloat16 else None)
    if kernels == "triton" and problem:
        raise RequestError(f"kernels=triton cannot run: {problem}; use kernels=auto, or bfloat16 on a CUDA device")
