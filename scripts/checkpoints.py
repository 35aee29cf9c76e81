"""The checkpoint that demo, server and host tests run: the tiny one of this pack, or a folder of the user."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache"
TINY_NAME = "tiny-h3"


def tiny_checkpoint(seed: int = 0) -> Path:
    """Folder with FL2VA/ and Ref2VA/ of the tiny H3, written on first use and when the code that writes it changes."""
    sources = sorted([*ROOT.glob("h3core/tiny/**/*.py"), *ROOT.glob("h3core/models/**/*.py")])
    version = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    folder = CACHE / "tiny-h3" / f"seed{seed}-{version}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=folder.parent))
    try:
        command = [sys.executable, str(ROOT / "_bootstrap.py"), "h3core.tiny"]
        command += ["--seed", str(seed), "--out", str(partial)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        partial.chmod(0o755)
        try:
            os.rename(partial, folder)
        except OSError:
            if not folder.is_dir():  # else another run wrote it meanwhile
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def user_checkpoint(path: str) -> tuple[str, Path]:
    """(name, folder) of a checkpoint the user names: one that holds FL2VA/ or Ref2VA/, or is one of them.

    Raises ValueError if it is neither.
    """
    folder = Path(path).expanduser().resolve()
    if not folder.is_dir():
        raise ValueError(f"MODEL={path} is not a folder; give one that holds FL2VA/ or Ref2VA/, or one of these")
    candidates = (folder, folder / "FL2VA", folder / "Ref2VA")
    if not any((candidate / "model_index.json").is_file() for candidate in candidates):
        raise ValueError(
            f"MODEL={path} has no FL2VA/model_index.json and no Ref2VA/model_index.json; "
            "give a folder in the layout of the MiniMax H3 release"
        )
    is_partition = folder.name in ("FL2VA", "Ref2VA")
    return (f"{folder.parent.name}-{folder.name}" if is_partition else folder.name), folder
