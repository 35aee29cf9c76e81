"""A LoRA file: its tensors and what it says of itself, read from the header; and by how much its factors count."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from comfyui_h3.h3core.checkpoint.index import TensorEntry, file_stamp, read_header, read_json
from comfyui_h3.h3core.errors import CheckpointError, RequestError
from comfyui_h3.h3core.lora.names import other_method

FASTH3_FORMAT = "fastvideo-lora-v2"  # metadata of the adapters of FastVideo/FastVideo-FastH3-4-step-Preview-v1-LoRA
FASTH3_MODULE = ".attn.to_gate_compress."  # a projection that only those students have

PEFT_METADATA = "lora_adapter_metadata"  # where diffusers' save_lora_adapter puts PEFT's config
PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # as PEFT's save_pretrained writes them

# LightX2V's H3 turbo files: rank 128, and the alpha of those that do not tell it. Files converted for ComfyUI have
# other names and are not meant.
TURBO_NAME = re.compile(r"minimax_h3_(fl2v|ref2v)_turbo_\d+step_v[\d.]+(_768p)?(_bf16)?\.safetensors")
TURBO_ALPHA = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """What trained factors are multiplied by: alpha / rank.

    alpha: of all modules; None where it is the rank of each. patterns: (end of a module's name, alpha), which win.
    is_rank_stabilised: alpha / sqrt(rank) instead. is_assumed: the file does not say it.
    """

    alpha: float | None = None
    patterns: tuple[tuple[str, float], ...] = ()
    is_rank_stabilised: bool = False
    is_assumed: bool = False

    def of(self, name: str, rank: int, own_alpha: float | None) -> float:
        """Of a module by the file's name of it. own_alpha: the module's ``.alpha`` tensor, which comes first."""
        alpha = own_alpha
        if alpha is None:
            alpha = next((value for end, value in self.patterns if f".{name}".endswith(f".{end}")), self.alpha)
        if alpha is None:
            return 1.0
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraFile:
    """Tensors by key, and metadata, of one file."""

    path: Path
    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]

    @classmethod
    def open(cls, path: Path) -> LoraFile:
        """Reads the header. Raises CheckpointError for a damaged file, RequestError for one that is not a LoRA."""
        if path.suffix != ".safetensors":
            raise RequestError(f"{path} is not a .safetensors file; other kinds of LoRA files are not read")
        entries = read_header(path)
        with _readable(path) as file:
            metadata = file.metadata() or {}
        lora = cls(path=path, entries=entries, metadata=metadata)
        lora._refuse_others()
        return lora

    def _refuse_others(self) -> None:
        model = self.metadata.get("finetuned_model", "").lower()
        if (
            self.metadata.get("format") == FASTH3_FORMAT
            or (model.startswith("fastvideo/") and "fasth3" in model)
            or any(FASTH3_MODULE in key for key in self.entries)
        ):
            raise RequestError(
                f"{self.path} is a FastH3 adapter: it makes another model, with steps and an attention of its own, and "
                "is not stacked as a LoRA. It gets a switch of its own, which this version does not have yet; take it "
                "out of H3 LoRA"
            )
        found = other_method(self.entries)
        if found is None and self._peft().get("use_dora") is True:
            found = "DoRA", PEFT_METADATA if PEFT_METADATA in self.metadata else PEFT_CONFIG
        if found is not None:
            raise RequestError(
                f"{self.path} is a {found[0]} ({found[1]}), which cannot be merged as a LoRA; use a plain LoRA"
            )

    def scaling(self) -> Scaling:
        """alpha where the file says it for all modules: in PEFT's config, or as ``alpha`` in its metadata.

        Raises CheckpointError for an alpha that is not a number, RequestError for patterns that are no names.
        """
        config = self._peft()
        if "lora_alpha" in config:
            patterns = config.get("alpha_pattern") or {}
            if not isinstance(patterns, dict) or not all(re.fullmatch(r"\^?[\w.]+", name) for name in patterns):
                raise RequestError(f"{self.path}: its alpha_pattern {patterns!r} is not a list of module names")
            return Scaling(
                alpha=self._number("lora_alpha", config["lora_alpha"]),
                patterns=tuple((name.lstrip("^"), self._number(name, value)) for name, value in patterns.items()),
                is_rank_stabilised=config.get("use_rslora") is True,
            )
        if any(key.endswith(".alpha") for key in self.entries):
            return Scaling()
        if "alpha" in self.metadata:
            return Scaling(alpha=self._number("alpha", self.metadata["alpha"]))
        if TURBO_NAME.fullmatch(self.path.name):
            return Scaling(alpha=TURBO_ALPHA, is_assumed=True)
        return Scaling()

    def read_alphas(self) -> dict[str, float]:
        """The ``.alpha`` tensors of one number each, by key. Raises CheckpointError for one that is not finite."""
        keys = [key for key, entry in self.entries.items() if key.endswith(".alpha") and entry.num_elements == 1]
        with _readable(self.path) as file:
            return {key: self._number(key, file.get_tensor(key).item()) for key in keys}

    def _peft(self) -> dict[str, Any]:
        """PEFT's config, from the metadata or from the file beside; empty where there is none."""
        if PEFT_METADATA in self.metadata:
            try:
                config = json.loads(self.metadata[PEFT_METADATA])
            except (ValueError, RecursionError) as error:
                raise CheckpointError(
                    f"{self.path}: its {PEFT_METADATA} is not valid JSON ({error}); download it again"
                ) from error
            if not isinstance(config, dict):
                raise CheckpointError(f"{self.path}: its {PEFT_METADATA} is not a JSON object; download it again")
            return {re.sub(r"^transformer(_ref)?\.", "", key): value for key, value in config.items()}
        config_file = self.path.with_name(PEFT_CONFIG)
        return read_json(config_file) if self.path.name == PEFT_FILE and config_file.exists() else {}

    def _number(self, name: str, value: Any) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise CheckpointError(f"{self.path}: {name} is {value!r}, not a number; download it again")
        return number


class LoraReader:
    """Reads tensors of LoRA files, each opened once, inside a ``with``. Raises CheckpointError as a ``Reader`` does."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._files: dict[Path, Any] = {}

    def __enter__(self) -> LoraReader:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def read(self, key: str, entry: TensorEntry) -> Tensor:
        """One tensor, on the CPU. Raises CheckpointError when its file has changed, or it is not finite."""
        try:
            if entry.file not in self._files:
                if file_stamp(entry.file) != entry.stamp:
                    raise CheckpointError(f"{entry.file} was changed after it was opened; run Load H3 again")
                self._files[entry.file] = self._stack.enter_context(_readable(entry.file))
            tensor = self._files[entry.file].get_tensor(key).float()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{entry.file} cannot be read ({error}); download it again") from error
        if not tensor.isfinite().all():
            raise CheckpointError(f"{entry.file}: {key} has values that are not finite; download it again")
        return tensor


@contextmanager
def _readable(path: Path) -> Iterator[Any]:
    try:
        opened = safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); download it again") from error
    with opened as file:
        yield file
