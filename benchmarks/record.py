"""One JSON file per benchmark run: what was measured, on what, with which code."""

import json
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def write_record(
    name: str,
    figures: Mapping[str, float],
    shapes: Mapping[str, object],
    *,
    device: torch.device,
    out: Path | None = None,
    commit: str | None = None,
) -> Path:
    """Write ``<device>_<name>.json`` into ``out`` (default: benchmarks/results) and return its path.

    figures: "group.name" -> number, the unit at the end of the name (``_us``, ``_gb``). shapes: their sizes.
    commit: for a copy of the files without git; else that of the checkout, ``-dirty`` where files differ from it.
    """
    for key in figures:
        group, _, figure = key.partition(".")
        if not group or not figure:
            raise ValueError(f"figure {key!r} is not named group.name")
    device_name = _device_name(device)
    record = {
        "name": name,
        "device": device_name,
        "commit": commit or _commit(),
        "versions": _versions(device),
        "shapes": dict(shapes),
        "figures": {key: round(value, 4) for key, value in figures.items()},
    }
    folder = out or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    slug = "-".join(device_name.removeprefix("NVIDIA ").lower().replace("(", " ").replace(")", " ").split())
    path = folder / f"{slug}_{name}.json"
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return path


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine() or device.type


def _versions(device: torch.device) -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version(), "torch": torch.__version__}
    versions["cuda"] = torch.version.cuda if device.type == "cuda" else None
    try:
        versions["triton"] = metadata.version("triton")
    except metadata.PackageNotFoundError:
        versions["triton"] = None
    return versions


def _commit() -> str:
    head = _git("rev-parse", "HEAD")
    if not head:
        return "unknown"
    changed = _git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    return f"{head}-dirty" if changed else head


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
