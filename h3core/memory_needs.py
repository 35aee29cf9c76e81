"""What the stages of a request take on the device of an engine: weights from the modules, activations from its rows."""

from __future__ import annotations

from functools import cached_property

from torch import nn

from comfyui_h3.h3core.checkpoint.loader import num_bytes
from comfyui_h3.h3core.config import EngineConfig
from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.memory_plan import MemoryPlan, Need, plan_memory
from comfyui_h3.h3core.models.dit.adaln import Modulator
from comfyui_h3.h3core.parts import Checkpoints, Parts
from comfyui_h3.h3core.residency import Residency, available_host_bytes
from comfyui_h3.h3core.sampling.packing import layout_of
from comfyui_h3.h3core.types import Conditioning, EncodedMedia, Latents, ResolvedRequest, Task

# Activations, weights aside. Upper bounds at the sizes of the release; the tiny model needs less.
ENCODE_BYTES_PER_ROW = 256 << 10
USUAL_TEXT_ROWS = 1000
USUAL_TIMESTEPS = 100  # of 49 forwards, each with two clocks; conditions have two more
ENCODE_TILE_BYTES = 6 << 30  # a batch of tiles, and the weights as float16 halves
ENCODE_AUDIO_BYTES = 1 << 30
DECODE_TILE_BYTES = 3 << 29  # a batch of tiles
DECODE_AUDIO_BYTES_PER_LATENT = 512 << 10  # ten tensors of 800 samples of 8 channels, of both sides


def encode_bytes(num_text: int) -> int:
    """Activations of the text encoder over that many rows."""
    return num_text * ENCODE_BYTES_PER_ROW


def decode_video_bytes(request: ResolvedRequest) -> int:
    """Activations of a batch of tiles, and three canvases of one time window (28 frames) in float32."""
    return DECODE_TILE_BYTES + 3 * 28 * 3 * 4 * request.height * request.width


def decode_audio_bytes(request: ResolvedRequest) -> int:
    return request.num_audio_latents * DECODE_AUDIO_BYTES_PER_LATENT


class MemoryNeeds:
    """Of one engine. Reads no weights."""

    def __init__(self, config: EngineConfig, checkpoints: Checkpoints, parts: Parts, weights: Residency):
        self._config = config
        self._checkpoints = checkpoints
        self._parts = parts
        self._weights = weights

    def plan(
        self,
        request: ResolvedRequest,
        media: EncodedMedia | None = None,
        held_bytes: int = 0,
    ) -> MemoryPlan:
        """Of the whole job, from its media to the sound. Prompt and number of forwards count as usual ones.

        Before its media are encoded they count as none in the later stages. held_bytes: of tables that are there now.
        """
        num_text = USUAL_TEXT_ROWS + (0 if media is None else view_rows(media))
        conditions = () if media is None else tuple(medium.condition for medium in media.media)
        num_rows = layout_of(request, num_text, conditions).num_rows
        stages = [
            ("encode", "text_encoder", encode_bytes(num_text), 0),
            ("sample", "dit", self.row_bytes(num_rows, request.task), layer_bytes(self._modulator)),
            ("decode_video", "video_decoder", decode_video_bytes(request), 0),
            ("decode_audio", "audio_decoder", decode_audio_bytes(request), 0),
        ]
        if request.task != "t2va":
            parts = [("video_encoder", ENCODE_TILE_BYTES), ("audio_encoder", ENCODE_AUDIO_BYTES)]
            stages = [("encode_media", part, working_bytes, 0) for part, working_bytes in parts] + stages
        needs = []
        for stage, part, working_bytes, setup_bytes in stages:
            name = self.part(part, request.task)
            needs.append(
                Need(
                    stage=stage,
                    part=name,
                    weight_bytes=self._weights.weight_bytes(name),
                    working_bytes=working_bytes,
                    setup_bytes=setup_bytes,
                )
            )
        capacity_bytes = self._weights.capacity_bytes()
        if capacity_bytes is not None:
            capacity_bytes += held_bytes
        return plan_memory(needs, capacity_bytes, USUAL_TIMESTEPS * timestep_bytes(self._modulator))

    def check_host(self, request: ResolvedRequest, media: EncodedMedia | None, clip_bytes: int) -> None:
        """Raises RequestError when frames, of the video or of a clip, and on a CPU activations, cannot be held."""
        needed = max(clip_bytes, request.num_frames * request.height * request.width * 3)
        if self._config.torch_device.type == "cpu":
            conditions = () if media is None else tuple(medium.condition for medium in media.media)
            num_rows = layout_of(request, USUAL_TEXT_ROWS, conditions).num_rows
            needed = max(needed, self.row_bytes(num_rows, request.task))
        available = available_host_bytes()
        if available is not None and needed > available:
            raise RequestError(
                f"{request.num_frames} frames of {request.width}x{request.height} need about {needed / 2**30:.0f} GiB "
                f"of memory, {available / 2**30:.0f} GiB are available; use fewer frames or a smaller size"
            )

    def missing_bytes(self, stage: str, given: EncodedMedia | Conditioning | Latents | None) -> int:
        """As ``Engine.missing_bytes``."""
        if stage == "encode_media" and given is None:
            return self._missing("video_encoder", self.any_task, ENCODE_TILE_BYTES)
        if stage == "encode" and (given is None or isinstance(given, EncodedMedia)):
            task = self.any_task if given is None else given.task
            num_text = USUAL_TEXT_ROWS + (0 if given is None else view_rows(given))
            return self._missing("text_encoder", task, encode_bytes(num_text))
        if stage == "sample" and isinstance(given, Conditioning):
            return self._missing("dit", given.request.task, self.sample_bytes(given, USUAL_TIMESTEPS))
        if stage == "decode_video" and isinstance(given, Latents):
            return self._missing("video_decoder", given.request.task, decode_video_bytes(given.request))
        if stage == "decode_audio" and isinstance(given, Latents):
            return self._missing("audio_decoder", given.request.task, decode_audio_bytes(given.request))
        raise ValueError(f"there is no stage {stage!r} that gets a {type(given).__name__}")

    def sample_bytes(self, conditioning: Conditioning, num_timesteps: int) -> int:
        """Activations of a forward, and the tables of so many timesteps that are still to be made."""
        layout = layout_of(conditioning.request, len(conditioning.text), conditioning.conditions)
        tables_bytes = num_timesteps * timestep_bytes(self._modulator)
        return self.row_bytes(layout.num_rows, conditioning.request.task) + tables_bytes

    def row_bytes(self, num_rows: int, task: Task) -> int:
        """Activations of a forward over that many rows."""
        return num_rows * self._checkpoints.of(task).dit_config.bytes_per_row(self._config.torch_dtype.itemsize)

    def part(self, part: str, task: Task) -> str:
        """The name that a part has among all the engine has."""
        return self._parts.names[self._checkpoints.of(task).partition, part]

    @property
    def any_task(self) -> Task:
        return "ref2va" if list(self._checkpoints.opened) == ["ref2va"] else "t2va"

    def _missing(self, part: str, task: Task, working_bytes: int) -> int:
        return self._weights.missing_bytes(self.part(part, task), working_bytes)

    @cached_property
    def _modulator(self) -> Modulator:
        """On meta. Its weights are on the device a layer at a time, before the first forward."""
        return self._checkpoints.first.new_modulator(self._config.torch_dtype)


def layer_bytes(modulator: Modulator) -> int:
    """Weights of the largest layer."""
    layers: list[nn.Module] = [modulator.time_embedder, *modulator.blocks, modulator.final_layer]
    return max(map(num_bytes, layers))


def timestep_bytes(modulator: Modulator) -> int:
    """The tables of one timestep: as many values as the projections have outputs."""
    return sum(tensor.nbytes for name, tensor in modulator.state_dict().items() if name.endswith("proj.linear.bias"))


def view_rows(media: EncodedMedia) -> int:
    """About as many rows as the text encoder has for the pixels it sees: one for 32 x 32 pixels of two frames."""
    views = [medium.view for medium in media.presented if medium.view is not None]
    return sum(-(-view.shape[0] // 2) * view.shape[1] * view.shape[2] // 1024 for view in views)
