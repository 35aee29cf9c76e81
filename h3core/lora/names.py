"""Which parameter of the transformer a key of a LoRA file means, as tables.

Modules are spelled in two ways, natively (as the release) and as diffusers' ``MiniMaxH3Transformer3DModel``, each with
the prefix of some trainer or host, or flattened behind ``lora_unet_`` with underscores for dots. Public source of the
forms: ``loaders/lora_pipeline.py`` (``MiniMaxH3LoraLoaderMixin``) and ``loaders/lora_conversion_utils.py`` of
diffusers 0.42.1, ``comfy/lora.py`` of ComfyUI.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from comfyui_h3.h3core.checkpoint.diffusers_layout import DIT_NAMES, rename

Role = Literal["down", "up", "alpha", "diff", "diff_b", "set_weight"]
Order = Literal["same", "halves swapped", "interleaved per head"]
"""How a file's rows lie, against the engine's [q | k | v] and [gate | up]."""

REF_PREFIX = "transformer_ref."  # diffusers' name of the transformer of the ref2va weights
PREFIXES = ("base_model.model.", "model.diffusion_model.", "diffusion_model.", "transformer.", REF_PREFIX)
HOST_PREFIXES = ("model.diffusion_model.", "diffusion_model.")  # ComfyUI's
FLAT_PREFIXES = ("lora_unet_", "lora_transformer_")  # kohya's

_ROLES: tuple[tuple[re.Pattern[str], Role], ...] = (
    (re.compile(r"(lora_A|lora_down)(\.[^.]+)?\.weight|lora\.down\.weight"), "down"),
    (re.compile(r"(lora_B|lora_up)(\.[^.]+)?\.weight|lora\.up\.weight"), "up"),
    (re.compile(r"alpha"), "alpha"),
    (re.compile(r"diff"), "diff"),
    (re.compile(r"diff_b"), "diff_b"),
    (re.compile(r"set_weight"), "set_weight"),
)

OTHER_METHODS = (
    (re.compile(r".*\.(dora_scale|lora_magnitude_vector(\..+)?)"), "DoRA"),
    (re.compile(r".*\.hada_[wt]\d(_[ab])?"), "LoHa"),
    (re.compile(r".*\.lokr_[wt]\d(_[ab])?"), "LoKr"),
    (re.compile(r".*\.(oft_blocks|oft_diag|oft_R\..+)"), "OFT"),
)
"""Pattern of a key -> the method, other than LoRA, whose files have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The engine's module behind a file's name of it. third: of its rows, 0 for q, 1 for k, 2 for v; None for all."""

    module: str
    spelling: Literal["native", "diffusers"]
    third: int | None = None
    order: Order = "same"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key, read. name: the module as the file spells it, without prefixes. suffix: what stands behind the module.

    target: None when it is no module of the transformer. role: None for a suffix that is not known.
    """

    name: str
    prefixes: tuple[str, ...]
    suffix: str
    target: Target | None
    role: Role | None

    @property
    def family(self) -> str:
        """Whose spelling it is: "kohya", "ComfyUI", "diffusers" or "official"."""
        if self.prefixes and self.prefixes[0] in FLAT_PREFIXES:
            return "kohya"
        if set(self.prefixes) & set(HOST_PREFIXES):
            return "ComfyUI"
        return "diffusers" if self.target is not None and self.target.spelling == "diffusers" else "official"

    @property
    def is_interleaved(self) -> bool:
        """Whether rows of a native qkv lie per head, as in the release's files, and not as [q | k | v].

        Shapes cannot tell. DiffSynth-Studio trains on the release's rows as they are, and alone writes PEFT's
        ``.default`` behind native names without a prefix (docstring of diffusers' ``MiniMaxH3LoraLoaderMixin``); all
        others stack them when they load.
        """
        is_native_qkv = (
            self.target is not None
            and self.target.spelling == "native"
            and self.target.module.endswith(".attn.qkv_proj")
        )
        return is_native_qkv and not self.prefixes and self.suffix in ("lora_A.default.weight", "lora_B.default.weight")


class Names:
    """Reads keys for a model with these modules."""

    def __init__(self, modules: Iterable[str]):
        self._targets = _targets(modules)
        self._depth = max((name.count(".") + 1 for name in self._targets), default=0)
        self._flat = {name.replace(".", "_"): target for name, target in self._targets.items()}

    def read(self, key: str) -> Key:
        """What a key means."""
        for prefix in FLAT_PREFIXES:
            if key.startswith(prefix):
                name, _, suffix = key.removeprefix(prefix).partition(".")
                return _key(name, (prefix,), suffix, self._flat)
        prefixes: list[str] = []
        rest = key
        while prefix := next((one for one in PREFIXES if one not in prefixes and rest.startswith(one)), ""):
            prefixes.append(prefix)
            rest = rest.removeprefix(prefix)
        parts = rest.split(".")
        for length in range(min(len(parts) - 1, self._depth), 0, -1):
            name = ".".join(parts[:length])
            if name in self._targets:
                return _key(name, tuple(prefixes), ".".join(parts[length:]), self._targets)
        return Key(name=rest, prefixes=tuple(prefixes), suffix="", target=None, role=None)


def other_method(keys: Iterable[str]) -> tuple[str, str] | None:
    """The method of a file that is not a LoRA, and the key that shows it; None for one that is."""
    for key in keys:
        for pattern, method in OTHER_METHODS:
            if pattern.fullmatch(key):
                return method, key
    return None


def _key(name: str, prefixes: tuple[str, ...], suffix: str, targets: Mapping[str, Target]) -> Key:
    role = next((role for pattern, role in _ROLES if pattern.fullmatch(suffix)), None)
    return Key(name=name, prefixes=prefixes, suffix=suffix, target=targets.get(name), role=role)


def _targets(modules: Iterable[str]) -> dict[str, Target]:
    targets = {}
    for module in modules:
        targets[module] = Target(module=module, spelling="native")
        theirs = rename(f"{module}.", DIT_NAMES).removesuffix(".")
        if module.endswith(".attn.qkv_proj"):
            for third, letter in enumerate("qkv"):
                name = theirs.replace("qkv_proj", f"to_{letter}")
                targets[name] = Target(module=module, spelling="diffusers", third=third)
        elif module.endswith(".mlp.fc1"):
            targets[theirs] = Target(module=module, spelling="diffusers", order="halves swapped")
        elif theirs != module:
            targets[theirs] = Target(module=module, spelling="diffusers")
    return targets
