"""What an engine is built from. Frozen: an engine with another configuration is another engine."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch

from comfyui_h3.h3core.accel.attention import ATTENTIONS
from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.kernels.dispatch import BACKENDS, tensor_core_problem

Partition = Literal["fl2va", "ref2va"]
PARTITIONS: dict[Partition, str] = {"fl2va": "FL2VA", "ref2va": "Ref2VA"}  # the folder of each in a checkpoint
WEIGHTS: tuple[Partition | Literal["auto"], ...] = ("auto", *PARTITIONS)
QUALITIES = ("lossless", "exact")
EncodePrecision = Literal["auto", "float32", "split", "half"]
PRECISIONS = ("auto", "bfloat16", "float32", "fp8")
TRANSFORMERS: dict[Partition, str] = {"fl2va": "transformer", "ref2va": "transformer_ref"}  # as diffusers names them
COMPONENTS = (*TRANSFORMERS.values(), "text_encoder", "video_vae", "audio_vae")
LAYOUTS = ("auto", "official", "diffusers", "comfyui")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentSource:
    """One component that is not where, or not what, the checkpoint's folder would have it be.

    component: "transformer" is that of fl2va, "transformer_ref" that of ref2va; the others serve both.
    path: a .safetensors file or the folder that holds them; None: where the checkpoint has it. Sizes stay those of the
        checkpoint's configs.
    layout: how files name and order tensors. "auto" finds it out from them, and refuses where they do not say.

    Raises RequestError for values outside these.
    """

    component: str
    path: Path | None = None
    layout: str = "auto"

    def __post_init__(self) -> None:
        for name, value, allowed in (("component", self.component, COMPONENTS), ("layout", self.layout, LAYOUTS)):
            if value not in allowed:
                raise RequestError(f"{name}={value!r} does not exist; use one of {', '.join(allowed)}")
        if self.path is not None:
            object.__setattr__(self, "path", Path(self.path))


class LoraChoice(NamedTuple):
    """A LoRA file, and by how much its change counts: 1 as trained, 0 not at all, negative the opposite."""

    path: Path
    strength: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine on one device. "auto" is resolved when the object is made, so equal engines are equal configurations.

    checkpoint: folder in the official layout (it holds FL2VA/ and Ref2VA/), one of these two folders itself, or a
        folder of diffusers (it holds transformer/, transformer_ref/ or both).
    partition: which of the two sets of weights. "fl2va" runs text to video and keyframes, "ref2va" references; with
        "auto" each request takes the one it needs, of those that are in the folder.
    device: a torch device; "auto" is the first CUDA device, or the CPU where there is none.
    precision: of the DiT and the text encoder; "auto" is the checkpoint's bfloat16 on a GPU and float32 on a CPU.
        float16 does not exist here: the residual stream of H3 leaves its range and the picture turns black.
        "fp8" is an approximation: the linears of both are rounded to 8 bits (e4m3) when they are read, all else stays
        bfloat16. Half the memory; on GPUs with 8-bit products (compute capability 8.9 on) their rows are rounded, too,
        and they run almost twice as fast.
    quality: "exact" computes in the order of the public reference; "lossless" computes the same, and may add up in
        another order where that is faster.
    attention: of the DiT. "auto" takes the fastest that runs here, of one precision all: FlashAttention 3 on a Hopper
        GPU with the package fa3-fwd, others on other GPUs, PyTorch's own where there is none. A name insists on that
        one. "fa3_fp8" is an approximation: FlashAttention 3 over queries, keys and values in 8 bits.
    kernels: "auto" takes the Triton kernels where they can run; "triton" insists on them, "torch" never uses them.
    encode_precision: of the encoder that makes latents of pictures and clips. "split" multiplies float16 halves of
        float32 numbers on tensor cores, to the accuracy of "float32"; "half" one float16 number for each, which moves
        the latents by about a thousandth. "auto" is "split" where its kernels can run, and "float32" elsewhere and
        with quality="exact".
    loras: in the order they are merged into the transformer; pairs of (file, strength) will do. Other LoRAs are another
        engine: weights are read again, so that leaving one out gives the checkpoint's bit for bit.
    components: those that are read from somewhere else, or in a layout that their files do not say.

    Raises RequestError for values outside these.
    """

    checkpoint: Path
    partition: Partition | Literal["auto"] = "auto"
    device: str = "auto"
    precision: str = "auto"
    quality: str = "lossless"
    attention: str = "auto"
    kernels: str = "auto"
    encode_precision: EncodePrecision = "auto"
    loras: tuple[LoraChoice, ...] = ()
    components: tuple[ComponentSource, ...] = ()

    def __post_init__(self) -> None:
        if self.partition not in WEIGHTS:
            raise RequestError(f"partition={self.partition!r} does not exist; use one of {', '.join(WEIGHTS)}")
        if self.precision in ("float16", "fp16", "half"):
            raise RequestError(
                "precision=float16 is not possible: values inside H3 pass 65,504, the picture would be black; "
                "use bfloat16 or float32"
            )
        if self.precision not in PRECISIONS:
            raise RequestError(f"precision={self.precision!r} does not exist; use one of {', '.join(PRECISIONS)}")
        if self.quality not in QUALITIES:
            raise RequestError(f"quality={self.quality!r} does not exist; use one of {', '.join(QUALITIES)}")
        if self.attention not in ATTENTIONS:
            raise RequestError(f"attention={self.attention!r} does not exist; use one of {', '.join(ATTENTIONS)}")
        if self.kernels not in BACKENDS:
            raise RequestError(f"kernels={self.kernels!r} does not exist; use one of {', '.join(BACKENDS)}")
        for name, value in (("precision", self.precision), ("attention", self.attention)):
            if self.quality == "exact" and value.endswith("fp8"):
                raise RequestError(
                    f"{name}={value} is an approximation, and quality is exact; use quality=lossless or another {name}"
                )
        if self.encode_precision not in get_args(EncodePrecision):
            raise RequestError(
                f"encode_precision={self.encode_precision!r} does not exist; use one of "
                f"{', '.join(get_args(EncodePrecision))}"
            )
        _check_components(self.components, self.partition)
        device = _resolve_device(self.device)
        if self.encode_precision in ("split", "half"):
            problem = "quality is exact" if self.quality == "exact" else tensor_core_problem(device)
            problem = "kernels is torch" if self.kernels == "torch" else problem
            if problem is not None:
                raise RequestError(f"encode_precision={self.encode_precision} cannot run: {problem}; use auto")
        object.__setattr__(self, "checkpoint", Path(self.checkpoint))
        object.__setattr__(self, "loras", tuple(_checked(*lora) for lora in self.loras))
        object.__setattr__(self, "components", tuple(self.components))
        object.__setattr__(self, "device", str(device))
        if self.precision == "auto":
            object.__setattr__(self, "precision", "float32" if device.type == "cpu" else "bfloat16")

    @classmethod
    def from_env(cls, **settings) -> EngineConfig:
        """The configuration with the debugging override H3_KERNELS (auto, triton, torch) taken from the environment."""
        return cls(kernels=os.environ.get("H3_KERNELS", "auto"), **settings)

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        """dtype that the DiT and the text encoder compute in."""
        return torch.bfloat16 if self.precision == "fp8" else getattr(torch, self.precision)

    @property
    def weight_dtype(self) -> torch.dtype:
        """dtype that their linears are kept in."""
        return torch.float8_e4m3fn if self.precision == "fp8" else self.torch_dtype

    @property
    def vae_dtype(self) -> torch.dtype:
        """dtype of the video decoder's matrix products: float16 on a GPU, as the release runs it, else float32."""
        return torch.float32 if self.torch_device.type == "cpu" else torch.float16


def _checked(path: Path, strength: float) -> LoraChoice:
    """One LoRA. Raises RequestError for a strength that is not a finite number."""
    if not isinstance(strength, int | float) or not math.isfinite(strength):
        raise RequestError(
            f"strength={strength!r} of the LoRA {Path(path).name} is not possible; use a finite number, 1 as trained"
        )
    return LoraChoice(path=Path(path), strength=float(strength))


def _check_components(components: tuple[ComponentSource, ...], partition: str) -> None:
    """Raises RequestError for one that is given twice, or that the partition does not use."""
    names = [source.component for source in components]
    for name in names:
        if names.count(name) > 1:
            raise RequestError(f"components has {name} twice; give it once")
    for owner, name in TRANSFORMERS.items():
        if name in names and partition not in ("auto", owner):
            raise RequestError(
                f"components has {name}, which partition={partition} does not use; use partition={owner}, or auto"
            )


def _resolve_device(name: str) -> torch.device:
    """The device, with "auto" and a missing number resolved. Raises RequestError when it is not on this machine."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise RequestError(f"device={name!r} is not a device; use auto, cpu or cuda:N") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise RequestError(f"device={name!r} is not supported; use auto, cpu or cuda:N")
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise RequestError(
            f"device={name!r} is not here: {torch.cuda.device_count()} CUDA devices found; "
            "use auto, cpu or a smaller number"
        )
    return torch.device("cuda", index)
