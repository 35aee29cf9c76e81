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
from comfyui_h3.h3core.media.frames import to_uint8
from comfyui_h3.h3core.media.mp4 import write_mp4
from comfyui_h3.h3core.media.prepare import Announce, PreparedMedium, prepare
from comfyui_h3.h3core.media.references import MediaRequest
from comfyui_h3.h3core.media_request import found_in_clips, largest_clip_bytes, resolve_media
from comfyui_h3.h3core.models.audio_vae import decoder as audio_decoder
from comfyui_h3.h3core.models.audio_vae import encoder as audio_encoder
from comfyui_h3.h3core.models.precision import exact_fp32
from comfyui_h3.h3core.models.text_encoder.template import Presentation, Presenter, media_items
from comfyui_h3.h3core.models.text_encoder.vision import PixelLimits
from comfyui_h3.h3core.models.video_vae import decoder as video_decoder
from comfyui_h3.h3core.models.video_vae import encoder as video_encoder
from comfyui_h3.h3core.parking import PARKING
from comfyui_h3.h3core.parts import Checkpoints, Parts
from comfyui_h3.h3core.request import check_seed, check_sigma_points, check_strict, resolve
from comfyui_h3.h3core.residency import Residency, available_host_bytes
from comfyui_h3.h3core.result_cache import ResultCache, key_of
from comfyui_h3.h3core.sampling.noise import Noise
from comfyui_h3.h3core.sampling.packing import layout_of
from comfyui_h3.h3core.sampling.sampler import sample
from comfyui_h3.h3core.sampling.schedule import Schedule
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

# Activations, weights aside. Upper bounds at the sizes of the release; the tiny model needs less.
ENCODE_BYTES_PER_ROW = 256 << 10
USUAL_TEXT_ROWS = 1000
ENCODE_TILE_BYTES = 4 << 30
ENCODE_AUDIO_BYTES = 1 << 30
DECODE_TILE_BYTES = 1 << 30
DECODE_AUDIO_BYTES = 1 << 30

RESULT_CACHE_BYTES = 1 << 30  # on the host; a prompt with a long reference clip is 130 MB, its latents 20 MB


class Engine:
    """Runs the stages of H3: ``encode_media``, ``encode``, ``sample``, ``decode_video``, ``decode_audio``, ``save``.

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
        self.checkpoints = Checkpoints.open(config)
        head_dim = self.checkpoints.first.dit_config.attention_head_dim
        self.attention = choose_attention(config.attention, self.device, self.dtype, head_dim)
        self._parts = Parts.of(self.checkpoints.opened, config, self.attention.attend)
        self._weights = Residency(self.device, self._parts.sources)
        self._results = ResultCache(RESULT_CACHE_BYTES)
        self._lock = threading.RLock()  # a callback may ask for another stage
        self._tokenizers: dict[Partition, tuple[Presenter, PixelLimits]] = {}
        log.info("%s", self.describe())

    def describe(self) -> str:
        """One line: which weights, how many, where and in which precision."""
        first = self.checkpoints.first
        num_weights = sum(entry.num_elements for entry in first.transformer.entries.values())
        return (
            f"MiniMax H3 {' and '.join(self.checkpoints.opened)}: {first.dit_config.num_layers} blocks of "
            f"{first.dit_config.hidden_size}, {_count(num_weights)} weights, {self.device}, "
            f"{str(self.dtype).removeprefix('torch.')}, attention {self.attention.name}"
        )

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
        self._check_host_memory(resolved, largest_clip_bytes(request, resolved))

        def announce(name: str) -> Progress:
            return PARKING.watched(None if on_medium is None else on_medium(name))

        timer = StageTimer(self.device)
        stage = timer.stage("encode_media", num_units=len(request.keyframes) + len(request.references))
        with self._lock, PARKING.stage(), self._weights.explained("encoding the media"), stage:
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
        self._check_host_memory(resolved, conditions=conditions)
        timer = StageTimer(self.device)
        with self._lock, PARKING.stage(), self._weights.explained("encoding"):
            presenter, limits = self._tokenizer(resolved.task)
            ids = presenter.prompt_ids(request.prompt)
            presented = () if media is None else media.presented
            views = [(medium.condition.kind, medium.condition.audio is not None) for medium in presented]
            pixels = [medium.view for medium in presented]
            key = key_of(self._part("text_encoder", resolved.task), self.config.precision, limits, ids, views, *pixels)

            def make() -> tuple[Tensor, Tensor]:
                presentation = presenter.present(request.prompt, media_items(presented, limits))
                with timer.stage("load_text_encoder"):
                    encoder = self._module("text_encoder", resolved.task, _encode_bytes(presentation), on_load)
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
            with timer.stage("load_dit"):
                dit = self._module("dit", request.task, self._sample_bytes(conditioning), on_load)
            with timer.stage("sample", num_units=schedule.num_forwards):
                video, audio = sample(dit, conditioning, noise, schedule, self.device, PARKING.watched(on_step))
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
                decoder = self._module("video_decoder", request.task, _decode_video_bytes(request), on_load)
            pixels = torch.empty(request.num_frames, request.height, request.width, 3, dtype=torch.uint8)
            with timer.stage("decode_video", num_units=request.num_frames):
                start = 0
                for part in video_decoder.decode(decoder, latents.video, on_tile=PARKING.watched(on_progress)):
                    stop = start + part.shape[1]
                    pixels[start:stop] = to_uint8(part).movedim(0, -1)
                    start = stop
            assert start == request.num_frames, f"decoded {start} of {request.num_frames} frames"
        return Frames(pixels=pixels, timings=latents.timings + timer.timings)

    @torch.no_grad()
    def video_parts(self, latents: Latents) -> Iterator[Tensor]:
        """The same frames before rounding: parts (3, F_i, H, W) float32 in [0, 1], in order."""
        with self._lock:
            task, num_bytes = latents.request.task, _decode_video_bytes(latents.request)
            yield from video_decoder.decode(self._module("video_decoder", task, num_bytes, None), latents.video)

    @torch.no_grad()
    def decode_audio(self, latents: Latents, *, on_load: Progress | None = None) -> Audio:
        """Stereo samples, float32 at 32 kHz. Raises OutputError when they are not finite."""
        timer = StageTimer(self.device)
        with self._lock, PARKING.stage(), self._weights.explained("decoding the audio"):
            with timer.stage("load_audio_decoder"):
                decoder = self._module("audio_decoder", latents.request.task, DECODE_AUDIO_BYTES, on_load)
            with timer.stage("decode_audio"):
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
            return len(self._tokenizer(self._any_task)[0].tokenize(text))

    def missing_bytes(self, stage: str, given: EncodedMedia | Conditioning | Latents | None = None) -> int:
        """Device memory that a stage, by the name of its method, would still take; 0 on a CPU.

        For a host with models of its own there, to make room before the call. ``given`` is what the stage will get:
        "encode" EncodedMedia or None, "sample" a Conditioning, "decode_video" and "decode_audio" Latents. The prompt
        counts as a usual one.
        """
        if self.device.type == "cpu":
            return 0
        if stage == "encode_media" and given is None:
            return self._missing_bytes("video_encoder", self._any_task, ENCODE_TILE_BYTES)
        if stage == "encode" and (given is None or isinstance(given, EncodedMedia)):
            task = self._any_task if given is None else given.task
            num_rows = USUAL_TEXT_ROWS + (0 if given is None else _view_rows(given))
            return self._missing_bytes("text_encoder", task, num_rows * ENCODE_BYTES_PER_ROW)
        if stage == "sample" and isinstance(given, Conditioning):
            return self._missing_bytes("dit", given.request.task, self._sample_bytes(given))
        if stage == "decode_video" and isinstance(given, Latents):
            return self._missing_bytes("video_decoder", given.request.task, _decode_video_bytes(given.request))
        if stage == "decode_audio" and isinstance(given, Latents):
            return self._missing_bytes("audio_decoder", given.request.task, DECODE_AUDIO_BYTES)
        raise ValueError(f"there is no stage {stage!r} that gets a {type(given).__name__}")

    def unload(self) -> None:
        """Gives the memory of all weights and kept results back; the next stage makes its own again."""
        with self._lock:
            self._weights.clear()
            self._results.clear()

    @property
    def _any_task(self) -> Task:
        return "ref2va" if list(self.checkpoints.opened) == ["ref2va"] else "t2va"

    def _part(self, part: str, task: Task) -> str:
        return self._parts.names[self.checkpoints.of(task).partition, part]

    def _module(self, part: str, task: Task, working_bytes: int, on_load: Progress | None) -> Any:
        return self._weights.get(self._part(part, task), working_bytes, PARKING.watched(on_load))

    def _missing_bytes(self, part: str, task: Task, working_bytes: int) -> int:
        return self._weights.missing_bytes(self._part(part, task), working_bytes)

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
                on_tile = announce(f"Encoding {medium.name}")
                exact = self.config.quality == "exact"
                latents = video_encoder.encode(encoder, frames.movedim(-1, 0), exact=exact, on_tile=on_tile)
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

    def _check_host_memory(
        self, request: ResolvedRequest, clip_bytes: int = 0, conditions: tuple[Condition, ...] = ()
    ) -> None:
        """Raises RequestError when frames, of the video or of a clip, and on a CPU activations, cannot be held."""
        needed = max(clip_bytes, request.num_frames * request.height * request.width * 3)
        if self.device.type == "cpu":
            num_rows = layout_of(request, USUAL_TEXT_ROWS, conditions).num_rows
            needed = max(needed, self._row_bytes(num_rows, request.task))
        available = available_host_bytes()
        if available is not None and needed > available:
            raise RequestError(
                f"{request.num_frames} frames of {request.width}x{request.height} need about {needed / 2**30:.0f} GiB "
                f"of memory, {available / 2**30:.0f} GiB are available; use fewer frames or a smaller size"
            )

    def _sample_bytes(self, conditioning: Conditioning) -> int:
        layout = layout_of(conditioning.request, len(conditioning.text), conditioning.conditions)
        return self._row_bytes(layout.num_rows, conditioning.request.task)

    def _row_bytes(self, num_rows: int, task: Task) -> int:
        return num_rows * self.checkpoints.of(task).dit_config.bytes_per_row(self.dtype.itemsize)


def _finite(latents: Tensor, name: str) -> Tensor:
    """The latents. Raises OutputError when they are not finite."""
    if not torch.isfinite(latents.sum()):
        raise OutputError(f"{name}: the VAE gave latents that are not finite; its weights may be damaged")
    return latents


def _encode_bytes(presentation: Presentation) -> int:
    return len(presentation.ids) * ENCODE_BYTES_PER_ROW


def _view_rows(media: EncodedMedia) -> int:
    """About as many rows as the text encoder has for the pixels it sees: one for 32 x 32 pixels of two frames."""
    views = [medium.view for medium in media.presented if medium.view is not None]
    return sum(-(-view.shape[0] // 2) * view.shape[1] * view.shape[2] // 1024 for view in views)


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
