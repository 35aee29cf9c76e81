"""Which H3 checkpoints lie below the host's model folders."""

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from comfyui_h3.h3core.config import PARTITIONS

log = logging.getLogger(__name__)

FOLDER = "minimax_h3"  # below models/, and the key in extra_model_paths.yaml
NONE_FOUND = "(no H3 model found: see README)"
PARTITION_FOLDERS = {str(partition): name for partition, name in PARTITIONS.items()}
MODEL_INDEXES = ("model_index.json", "modular_model_index.json")  # of the release and of diffusers
COMPONENT_FOLDERS = ("transformer", "transformer_ref", "text_encoder", "video_vae/source", "vae", "audio_vae")
DEPTH = 3  # levels below a root: models--owner--name/snapshots/<commit> of a downloaded cache


def find_checkpoints(roots: Sequence[str | os.PathLike[str]]) -> dict[str, Path]:
    """Folders of checkpoints by the name to choose them by; of two with one name, that of the earlier root.

    A checkpoint holds FL2VA/ or Ref2VA/, is such a folder itself, or is a folder of diffusers. Links are followed. A
    root may be one, too.
    """
    found: dict[str, Path] = {}
    for root in map(Path, roots):
        for folder in _checkpoints_below(root, DEPTH, seen=set()):
            name = root.name if folder == root else folder.relative_to(root).as_posix()
            found.setdefault(name, folder)
    return dict(sorted(found.items()))


def has_partition(folder: Path, weights: str) -> bool:
    """Whether these weights are in a checkpoint; "auto" takes what there is.

    Of a folder that is one partition itself, only its content knows.
    """
    return weights == "auto" or _is_partition(folder) or (folder / PARTITION_FOLDERS.get(weights, weights)).is_dir()


def component_folders(checkpoint: Path) -> dict[str, Path]:
    """Folders of weights in a checkpoint, of the release or of diffusers, by their path in it."""
    parts = [f"{partition}{name}" for partition in ("", "FL2VA/", "Ref2VA/") for name in COMPONENT_FOLDERS]
    return {part: checkpoint / part for part in parts if (checkpoint / part).is_dir()}


def _checkpoints_below(folder: Path, depth: int, seen: set[str]) -> Iterator[Path]:
    real = os.path.realpath(folder)
    if real in seen:  # a link that leads back
        return
    seen.add(real)
    try:
        if _is_partition(folder) or any((folder / name).is_dir() for name in PARTITION_FOLDERS.values()):
            yield folder
            return
        children = sorted(child for child in folder.iterdir() if not child.name.startswith(".") and child.is_dir())
    except OSError as error:  # no such root, or not ours to read
        log.info("%s is passed over: %s", folder, error.strerror)
        return
    for child in children if depth else ():
        yield from _checkpoints_below(child, depth - 1, seen)


def _is_partition(folder: Path) -> bool:
    """One partition of the release, or a folder of diffusers, which may have both transformers or one of them."""
    has_transformer = any((folder / name).is_dir() for name in ("transformer", "transformer_ref"))
    return has_transformer and any((folder / name).is_file() for name in MODEL_INDEXES)
