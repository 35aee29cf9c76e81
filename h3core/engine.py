"""The engine: the only thing nodes talk to. It owns the weights of one checkpoint on one device."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comfyui_h3.h3core.accel.attention import choose_attention
from comfyui_h3.h3core.config import EngineConfig, Partition
from comfyui_h3.h3core.errors import OutputError, RequestError
from comfyui_h3.h3core.media.mp4 import write_mp4
from comfyui_h3.h3core.media.prepare import Announce, PreparedMedium, prepare
from comfyui_h3.h3core.media.references import MediaRequest
from comfyui_h3.h3core.media_request import found_in_clips, largest_clip_bytes, resolve_media
from comfyui_h3.h3core.memory_needs import (
    ENCODE_AUDIO_BYTES,
    ENCODE_TILE_BYTES,
    MemoryNeeds,
    decode_audio_bytes,
    decode_video_bytes,
    encode_bytes,
)
from comfyui_h3.h3core.memory_plan import MemoryPlan
from comfyui_h3.h3core.models.audio_vae import decoder as audio_decoder
from comfyui_h3.h3core.models.audio_vae import encoder as audio_encoder
from comfyui_h3.h3core.models.precision import exact_fp32
from comfyui_h3.h3core.models.text_encoder.template import Presenter, media_items
from comfyui_h3.h3core.models.text_encoder.vision import PixelLimits
from comfyui_h3.h3core.models.video_vae import decoder as video_decoder
from comfyui_h3.h3core.models.video_vae import encoder as video_encoder
from comfyui_h3.h3core.parking import PARKING
from comfyui_h3.h3core.parts import Checkpoints, Parts
from comfyui_h3.h3core.request import (
    check_seed,
    check_sigma_points,
    check_strict,
    resolve,
    resolve_size,
    size_text,
)
from comfyui_h3.h3core.residency import Residency
from comfyui_h3.h3core.result_cache import ResultCache, key_of
from comfyui_h3.h3core.sampling.noise import Noise
from comfyui_h3.h3core.sampling.packing import pack
from comfyui_h3.h3core.sampling.sampler import sample
from comfyui_h3.h3core.sampling.schedule import Schedule
from comfyui_h3.h3core.sampling.steps import Steps
from comfyui_h3.h3core.tables import ModulationTables
from comfyui_h3.h3core.timing import StageTimer, Timings
from comfyui_h3.h3core.types import (
    Audio,
    Condition,
    Conditioning,
    EncodedMedia,
    EncodedMedium,
    Frames,
    Latents,
    Mp4,
    Progress,
    Request,
    ResolvedRequest,
    Task,
)
from comfyui_h3.kernels.dispatch import backend, triton_problem

log = logging.getLogger(__name__)

RESULT_CACHE_BYTES = 1 << 30  # on the host; a prompt with a long reference clip is 130 MB, its latents 20 MB


class Engine:
    """Runs the stages of H3: ``encode_media``, ``encode``, ``sample``, ``decode_video``, ``decode_audio``, ``save``.

    Making one reads configs and shard headers; weights are read when a stage first needs them and then stay, unless
    the device has no room for the next stage's. Stages may be called from any thread, one at a time; ``on_load`` counts
    the bytes of the weights a stage reads first.
    Raises CheckpointError when the checkpoint is incomplete or not H3, or a LoRA file is damaged; RequestError for a
    LoRA that is not one of H3.
    """

    def __init__(self, config: EngineConfig, checkpoints: Checkpoints | None = None):
        """checkpoints: opened already, in place of those in the folder of ``config``."""
        self.config = config
        self.device = config.torch_device
        self.dtype = config.torch_dtype
        _check_kernels(config.kernels, self.device, self.dtype)
        self.checkpoints = (checkpoints or Checkpoints.open(config)).merged(config.loras)
        head_dim = self.checkpoints.first.dit_config.attention_head_dim
        self.attention = choose_attention(config.attention, self.device, self.dtype, head_dim)
        self._parts = Parts.of(self.checkpoints.opened, config, self.attention.attend)
        self._weights = Residency(self.device, self._parts.sources)
        self._needs = MemoryNeeds(config, self.checkpoints, self._parts, self._weights)
        self._planned: set[MemoryPlan] = set()  # what the log has said
        self._results = ResultCache(RESULT_CACHE_BYTES)
        self._tables = ModulationTables(self.device, self.dtype)
        self._lock = threading.RLock()  # a callback may ask for another stage
        self._tokenizers: dict[Partition, tuple[Presenter, PixelLimits]] = {}
        log.info("%s", self.describe())

    def describe(self) -> str:
        """Which weights, how many, where and in which precision; then a line for each component that is not in the
        release's layout and place: its files, their layout, and how that was found; last one for each LoRA."""
        return self.checkpoints.describe(f"{self.device}, {self.config.precision}, attention {self.attention.name}")

    @torch.no_grad()
    def encode_media(
        self, request: MediaRequest, *, on_medium: Announce | None = None, on_load: Progress | None = None
    ) -> EncodedMedia:
        """Keyframes and references as the DiT and the text encoder read them.

        ``on_medium`` is asked by name for the callback of each part of the work: frames read, tiles encoded.

        Raises RequestError for media that are not possible, before any weight is read where that can be told.
        """
        request, resolved, notices = resolve_media(request)
        self.checkpoints.check(resolved.task)
        self._prepare_memory(resolved, clip_bytes=largest_clip_bytes(request, resolved))

        def announce(name: str) -> Progress:
            return PARKING.watched(None if on_medium is None else on_medium(name))

        timer, kernels = StageTimer(self.device), self.config.kernels
        stage = timer.stage("encode_media", num_units=len(request.keyframes) + len(request.references))
        with self._lock, PARKING.stage(), self._weights.explained("encoding the media"), backend(kernels), stage:
            media = []
            for medium in prepare(request, resolved, announce):
                media.append(self._encode_medium(medium, resolved.task, announce, on_load))
                del medium  # a clip is a gigabyte: it leaves before the next one is read
        found = found_in_clips(request)
        check_strict(found, request.strict)
        return EncodedMedia(request=resolved, media=tuple(media), notices=(*notices, *found), timings=timer.timings)

    @torch.no_grad()
    def encode(
        self,
        request: Request,
        media: EncodedMedia | None = None,
        *,
        on_progress: Progress | None = None,
        on_load: Progress | None = None,
    ) -> Conditioning:
        """The prompt, behind its media, as the DiT reads it. All checks of the request come before any weight is read.

        ``on_progress`` counts the layers. What was encoded before is not encoded again.

        Raises RequestError for an impossible request, one that the memory of this machine cannot hold among them.
        """
        resolved, notices = resolve(request, media)
        self.checkpoints.check(resolved.task)
        conditions = () if media is None else tuple(medium.condition for medium in media.media)
        self._prepare_memory(resolved, media)
        timer = StageTimer(self.device)
        with self._lock, PARKING.stage(), self._weights.explained("encoding"), backend(self.config.kernels):
            presenter, limits = self._tokenizer(resolved.task)
            ids = presenter.prompt_ids(request.prompt)
            presented = () if media is None else media.presented
            views = [(medium.condition.kind, medium.condition.audio is not None) for medium in presented]
            pixels = [medium.view for medium in presented]
            key = key_of(self._part("text_encoder", resolved.task), self.config.precision, limits, ids, views, *pixels)

            def make() -> tuple[Tensor, Tensor]:
                presentation = presenter.present(request.prompt, media_items(presented, limits))
                with timer.stage("load_text_encoder"):
                    encoder = self._module("text_encoder", resolved.task, encode_bytes(len(presentation.ids)), on_load)
                with timer.stage("encode", num_units=len(presentation.ids)), exact_fp32():
                    text = encoder(presentation, PARKING.watched(on_progress)).cpu()
                if not torch.isfinite(text.sum()):
                    raise OutputError("the text encoder gave states that are not finite; its weights may be damaged")
                return text, presentation.modality

            if key in self._results:
                PARKING.watched(on_progress)(1, 1)
            text, modality = self._results.get(key, make)
        log.info("encode: %d text rows", len(text))
        return Conditioning(
            request=resolved,
            text=text,
            modality=modality,
            conditions=conditions,
            notices=notices if media is None else media.notices + notices,
            timings=(Timings() if media is None else media.timings) + timer.timings,
        )

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

        Raises RequestError for a seed or a count that is not possible, or a conditioning these weights cannot read.
        """
        check_seed(seed)
        check_sigma_points(sigma_points)
        request = conditioning.request
        self.checkpoints.check(request.task)
        checkpoint = self.checkpoints.of(request.task)
        dit_config = checkpoint.dit_config
        if conditioning.text.shape[1] != dit_config.text_dim:
            raise RequestError(
                f"the conditioning is {conditioning.text.shape[1]} wide, this transformer reads {dit_config.text_dim}; "
                "encode the prompt with the same Load H3"
            )
        schedule = Schedule.uniform(sigma_points, checkpoint.video_shift, checkpoint.audio_shift)
        if noise is None:
            channels = {"video_channels": dit_config.latents_dim, "audio_channels": dit_config.audio_latents_dim}
            noise = Noise.draw(request, seed, conditions=conditioning.conditions, **channels)
        noise.check(request, conditioning.conditions)
        timer = StageTimer(self.device)
        with self._lock, PARKING.stage(), self._weights.explained("sampling"), backend(self.config.kernels):
            sequence = pack(request, conditioning.modality, conditioning.conditions)
            steps = Steps.of(sequence, schedule, exact=self.config.quality == "exact")
            with timer.stage("load_dit"):
                num_bytes = self._needs.sample_bytes(conditioning, self._tables.num_missing(checkpoint, steps))
                dit = self._module("dit", request.task, num_bytes, on_load)
            with timer.stage("modulate", num_units=steps.num_timesteps):
                modulation = self._tables.get(checkpoint, steps, PARKING.watched(on_load))
            with timer.stage("sample", num_units=schedule.num_forwards):
                video, audio = sample(
                    dit, modulation, conditioning, noise, steps, self.device, PARKING.watched(on_step)
                )
        return Latents(request=request, video=video, audio=audio, timings=conditioning.timings + timer.timings)

    @torch.no_grad()
    def decode_video(
        self, latents: Latents, *, on_progress: Progress | None = None, on_load: Progress | None = None
    ) -> Frames:
        """Frames as uint8, rounded. Raises OutputError when the decoder gives values that are not finite."""
        timer = StageTimer(self.device)
        request = latents.request
        with self._lock, PARKING.stage(), self._weights.explained("decoding the video"):
            with timer.stage("load_video_decoder"):
                decoder = self._module("video_decoder", request.task, decode_video_bytes(request), on_load)
            pixels = torch.empty(request.num_frames, request.height, request.width, 3, dtype=torch.uint8)
            with timer.stage("decode_video", num_units=request.num_frames), backend(self._decode_kernels):
                start = 0
                for part in video_decoder.decode_frames(decoder, latents.video, on_tile=PARKING.watched(on_progress)):
                    stop = start + len(part)
                    pixels[start:stop] = part
                    start = stop
            assert start == request.num_frames, f"decoded {start} of {request.num_frames} frames"
        return Frames(pixels=pixels, timings=latents.timings + timer.timings)

    @torch.no_grad()
    def video_parts(self, latents: Latents) -> Iterator[Tensor]:
        """The same frames before rounding: parts (3, F_i, H, W) float32 in [0, 1], in order."""
        with self._lock:
            task, num_bytes = latents.request.task, decode_video_bytes(latents.request)
            parts = video_decoder.decode(self._module("video_decoder", task, num_bytes, None), latents.video)
            while True:
                with backend(self._decode_kernels):  # not around the yield: between the parts the caller runs
                    part = next(parts, None)
                if part is None:
                    return
                yield part

    @torch.no_grad()
    def decode_audio(self, latents: Latents, *, on_load: Progress | None = None) -> Audio:
        """Stereo samples, float32 at 32 kHz. Raises OutputError when they are not finite."""
        timer = StageTimer(self.device)
        with self._lock, PARKING.stage(), self._weights.explained("decoding the audio"):
            with timer.stage("load_audio_decoder"):
                num_bytes = decode_audio_bytes(latents.request)
                decoder = self._module("audio_decoder", latents.request.task, num_bytes, on_load)
            with timer.stage("decode_audio"), backend(self._decode_kernels):
                samples = audio_decoder.decode(decoder, latents.audio).cpu()
        return Audio(
            samples=samples,
            sample_rate=self.checkpoints.of(latents.request.task).audio_vae_config.sample_rate,
            timings=latents.timings + timer.timings,
        )

    def save(self, frames: Frames, audio: Audio | None, path: Path, **options: Any) -> Mp4:
        """An MP4 at ``path``, complete or not there at all; options and errors are those of ``write_mp4``."""
        return write_mp4(path, frames, audio, **options)

    def count_tokens(self, text: str) -> int:
        """Tokens of a text as the encoder reads it."""
        with self._lock:
            return len(self._tokenizer(self._needs.any_task)[0].tokenize(text))

    def missing_bytes(self, stage: str, given: EncodedMedia | Conditioning | Latents | None = None) -> int:
        """Device memory that a stage, by the name of its method, would still take; 0 on a CPU.

        For a host with models of its own there, to make room before the call. ``given`` is what the stage will get:
        "encode" EncodedMedia or None, "sample" a Conditioning, "decode_video" and "decode_audio" Latents. The prompt
        counts as a usual one.
        """
        return 0 if self.device.type == "cpu" else self._needs.missing_bytes(stage, given)

    def plan(self, request: Request, media: EncodedMedia | None = None) -> MemoryPlan:
        """Which weights a job keeps on the device, and the memory of its stages. Reads no weights.

        Raises RequestError for a size that is not possible.
        """
        task = "t2va" if media is None else media.task
        size = request.width, request.height, request.num_frames, request.duration_s
        with self._lock:
            return self._plan(resolve_size(*size, task)[0], media)

    def unload(self) -> None:
        """Gives the memory of all weights and kept results back; the next stage makes its own again."""
        with self._lock:
            self._weights.clear()
            self._results.clear()
            self._tables.clear()

    @property
    def _decode_kernels(self) -> str:
        """Those of the VAEs add up in orders of their own."""
        return "torch" if self.config.quality == "exact" else self.config.kernels

    def _part(self, part: str, task: Task) -> str:
        return self._needs.part(part, task)

    def _module(self, part: str, task: Task, working_bytes: int, on_load: Progress | None) -> Any:
        return self._weights.get(self._part(part, task), working_bytes, PARKING.watched(on_load))

    def _tokenizer(self, task: Task) -> tuple[Presenter, PixelLimits]:
        checkpoint = self.checkpoints.of(task)
        if checkpoint.partition not in self._tokenizers:
            self._tokenizers[checkpoint.partition] = checkpoint.load_presenter(), checkpoint.load_pixel_limits()
        return self._tokenizers[checkpoint.partition]

    def _encode_medium(
        self, medium: PreparedMedium, task: Task, announce: Announce, on_load: Progress | None
    ) -> EncodedMedium:
        """Latents of one medium, found again when the same pixels or samples were encoded before."""
        video = audio = None
        frames, samples = medium.encoded_frames, medium.samples
        if frames is not None:
            part = self._part("video_encoder", task)

            def encode_frames() -> tuple[Tensor]:
                encoder = self._module("video_encoder", task, ENCODE_TILE_BYTES, on_load)
                pixels, on_tile = frames.movedim(-1, 0), announce(f"Encoding {medium.name}")
                exact, precision = self.config.quality == "exact", self.config.encode_precision
                latents = video_encoder.encode(encoder, pixels, exact=exact, precision=precision, on_tile=on_tile)
                return (_finite(latents, medium.name),)

            (video,) = self._results.get(key_of(part, frames), encode_frames)
        if samples is not None:
            part = self._part("audio_encoder", task)

            def encode_samples() -> tuple[Tensor]:
                encoder = self._module("audio_encoder", task, ENCODE_AUDIO_BYTES, on_load)
                return (_finite(audio_encoder.encode(encoder, samples), medium.name),)

            (audio,) = self._results.get(key_of(part, samples), encode_samples)
        condition = Condition(kind=medium.kind, video=video, audio=audio, frame=medium.frame)
        return EncodedMedium(condition=condition, view=medium.view)

    def _plan(self, request: ResolvedRequest, media: EncodedMedia | None) -> MemoryPlan:
        return self._needs.plan(request, media, held_bytes=self._tables.num_bytes)

    def _prepare_memory(self, request: ResolvedRequest, media: EncodedMedia | None = None, clip_bytes: int = 0) -> None:
        """Plans the job, and says so when the plan is a new one. Raises RequestError for what the host cannot hold."""
        self._needs.check_host(request, media, clip_bytes)
        if self.device.type == "cpu":
            return
        with self._lock:
            plan = self._plan(request, media)
            self._weights.follow(plan)
            if plan not in self._planned:
                self._planned.add(plan)
                log.info("memory on %s for %s, %s", self.device, size_text(request), plan.describe())


def _finite(latents: Tensor, name: str) -> Tensor:
    """The latents. Raises OutputError when they are not finite."""
    if not torch.isfinite(latents.sum()):
        raise OutputError(f"{name}: the VAE gave latents that are not finite; its weights may be damaged")
    return latents


def _check_kernels(kernels: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raises RequestError when the kernels are insisted on and cannot run."""
    problem = triton_problem(device) or (f"the precision is {dtype}" if dtype != torch.bfloat16 else None)
    if kernels == "triton" and problem:
        raise RequestError(f"kernels=triton cannot run: {problem}; use kernels=auto, or bfloat16 on a CUDA device")
