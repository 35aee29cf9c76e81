"""From the keys of a LoRA file to changes of parameters, every one checked against the model. Reads no weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from comfyui_h3.h3core.checkpoint.index import TensorEntry, some_of
from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.lora.file import LoraFile, Scaling
from comfyui_h3.h3core.lora.names import REF_PREFIX, Key, Names, Order, Role, Target
from comfyui_h3.h3core.lora.report import FailedKey, LoraReport

Shape = tuple[int, ...]
Kind = Literal["product", "sum", "assignment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a LoRA file."""

    key: str
    entry: TensorEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One change of a parameter W, or of the rows from ``first_row`` on, as many as the tensors have.

    product: W + scale * (tensors[0] @ tensors[1]), B and A. sum: W + scale * tensors[0]. assignment:
    W + scale * (tensors[0] - W). order: how the tensor's rows, for a product those of B, lie in the file.
    """

    kind: Kind
    scale: float
    tensors: tuple[StoredTensor, ...]
    first_row: int = 0
    order: Order = "same"


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What LoRAs are merged into: shapes of the parameters by name, and the heads whose rows a qkv interleaves."""

    shapes: Mapping[str, Shape]
    num_heads: int
    head_dim: int
    is_ref2va: bool = False

    def names(self) -> Names:
        return Names({name.rpartition(".")[0] for name in self.shapes if name.endswith((".weight", ".bias"))})


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """patches: by parameter, in the order of the file."""

    patches: Mapping[str, tuple[Patch, ...]]
    report: LoraReport


def plan(file: LoraFile, strength: float, base: Base) -> Planned:
    """What a file changes in ``base``. Keys that cannot be used are in the report and stop nothing.

    Raises CheckpointError or RequestError for a file whose alpha cannot be told.
    """
    names = base.names()
    keys = {key: names.read(key) for key in file.entries}
    has_ref2va = any(REF_PREFIX in key.prefixes for key in keys.values())
    planner = _Planner(file, strength, base)
    modules: dict[str, dict[Role, tuple[str, Key]]] = defaultdict(dict)
    for name, key in keys.items():
        # A file that names diffusers' second transformer has keys for each of the two.
        is_meant = not has_ref2va or (REF_PREFIX in key.prefixes) == base.is_ref2va
        if key.target is None or not is_meant:
            planner.ignored.append(name)
        elif key.role is None:
            planner.fail("this form of change is not known", name)
        elif key.role in modules[key.name]:
            planner.fail(f"{modules[key.name][key.role][0]} changes the same parameter", name)
        else:
            modules[key.name][key.role] = name, key
    for roles in modules.values():
        planner.plan_module(roles)
    return planner.planned({key.family for key in keys.values() if key.target is not None})


def check_applied(reports: Mapping[str, LoraReport]) -> None:
    """reports: of one file, by partition. Raises RequestError when it changes nothing in any of them."""
    report = next(iter(reports.values()))
    if any(other.applied for other in reports.values()):
        return
    if report.failed:
        first = report.failed[0]
        problem = f"none of its {len(report.failed)} keys for H3 can be merged ({first.key}: {first.reason})"
    else:
        found = some_of(sorted(report.ignored)) or "none"
        problem = f"none of its keys ({found}) names a parameter of these H3 weights"
    raise RequestError(
        f"{report.path} would change nothing: {problem}; take it out, or choose a LoRA made for MiniMax H3"
    )


class _Planner:
    def __init__(self, file: LoraFile, strength: float, base: Base):
        self._file = file
        self._strength = strength
        self._base = base
        self._scaling: Scaling = file.scaling()
        self._alphas = file.read_alphas()
        self._patches: dict[str, list[Patch]] = defaultdict(list)
        self._applied: list[str] = []
        self._failed: list[FailedKey] = []
        self._is_interleaved = False
        self.ignored: list[str] = []

    def fail(self, reason: str, *keys: str) -> None:
        self._failed += [FailedKey(key=key, reason=reason) for key in keys]

    def plan_module(self, roles: Mapping[Role, tuple[str, Key]]) -> None:
        """The patches of one module, whose keys are known by role."""
        self._plan_product({role: roles[role] for role in ("down", "up", "alpha") if role in roles})
        others: tuple[tuple[Role, Kind, str], ...] = (
            ("set_weight", "assignment", "weight"),
            ("diff", "sum", "weight"),
            ("diff_b", "sum", "bias"),
        )
        for role, kind, leaf in others:
            if role in roles:
                name, key = roles[role]
                shape = self._file.entries[name].shape
                self._add(kind, key, leaf, shape, self._strength, (name,), (name,))

    def _plan_product(self, roles: Mapping[Role, tuple[str, Key]]) -> None:
        keys = tuple(name for name, _ in roles.values())
        missing = [word for role, word in (("down", "lora_A"), ("up", "lora_B")) if role not in roles]
        if missing:
            self.fail(f"there is no {' and no '.join(missing)} for it", *keys)
            return
        (down, _), (up, key) = roles["down"], roles["up"]
        down_shape, up_shape = self._file.entries[down].shape, self._file.entries[up].shape
        if len(down_shape) != 2 or len(up_shape) != 2 or down_shape[0] != up_shape[1] or not down_shape[0]:
            self.fail(
                f"the factors have the shapes {list(up_shape)} and {list(down_shape)}, which are no product", *keys
            )
            return
        own_alpha = None
        if "alpha" in roles:
            own_alpha = self._alphas.get(roles["alpha"][0])
            if own_alpha is None:
                self.fail("alpha is not one number", *keys)
                return
        scale = self._strength * self._scaling.of(key.name, down_shape[0], own_alpha)
        self._add("product", key, "weight", (up_shape[0], down_shape[1]), scale, (up, down), keys)

    def _add(
        self,
        kind: Kind,
        key: Key,
        leaf: str,
        shape: Shape,
        scale: float,
        tensors: tuple[str, ...],
        keys: tuple[str, ...],
    ) -> None:
        assert key.target is not None
        target, parameter = key.target, f"{key.target.module}.{leaf}"
        if parameter not in self._base.shapes:
            self.fail(f"H3 has no {parameter}", *keys)
            return
        whole = self._base.shapes[parameter]
        wanted = whole if target.third is None else (whole[0] // 3, *whole[1:])
        if shape != wanted:
            self.fail(f"it changes {list(shape)}, {parameter} takes {list(wanted)}{self._hint(target)}", *keys)
            return
        stored = tuple(StoredTensor(key=name, entry=self._file.entries[name]) for name in tensors)
        integers = [tensor for tensor in stored if not tensor.entry.dtype.is_floating_point]
        if integers:
            self.fail(f"{integers[0].key} is stored as {integers[0].entry.dtype}, not as floating point numbers", *keys)
            return
        self._patches[parameter].append(
            Patch(
                kind=kind,
                scale=scale,
                tensors=stored,
                first_row=0 if target.third is None else target.third * wanted[0],
                order=self._order(key, target),
            )
        )
        self._applied += keys

    def _order(self, key: Key, target: Target) -> Order:
        if key.is_interleaved:
            self._is_interleaved = True
            return "interleaved per head"
        return target.order

    def _hint(self, target: Target) -> str:
        is_modulation = "adaln_proj" in target.module or target.module.startswith("time_embedder.")
        return " (weights with and without pruned AdaLN need LoRAs of their own)" if is_modulation else ""

    def planned(self, families: set[str]) -> Planned:
        notes = []
        if self._scaling.is_assumed:
            notes.append(f"alpha taken as {self._scaling.alpha:g}, as for LightX2V's turbo files that do not tell it")
        if self._is_interleaved:
            notes.append("qkv rows read per head, as DiffSynth-Studio writes them")
        return Planned(
            patches={name: tuple(patches) for name, patches in self._patches.items()},
            report=LoraReport(
                path=Path(self._file.path),
                strength=self._strength,
                families=tuple(sorted(families)) or ("unknown",),
                applied=tuple(self._applied),
                ignored=tuple(self.ignored),
                failed=tuple(self._failed),
                notes=tuple(notes),
            ),
        )
