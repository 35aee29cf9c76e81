"""Why a file is not the weights it should be: another format under its name, or a download that has not ended."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

FORMATS = (
    (b"\x80", "a pickle, which can run programs and is never read; convert it to safetensors"),
    (b"PK\x03\x04", "a zip archive, as torch.save writes pickles, which are never read; convert it to safetensors"),
    (b"GGUF", "a GGUF file; give it its own name, with .gguf at the end"),
    (b"version https://git-lfs", "a Git LFS pointer, not the weights behind it; run git lfs pull"),
    (b"<", "a page of a web site, not the file behind its link; download it again"),
)
"""How formats begin that are found under the name of a safetensors file, and what to do.

Sources: opcode PROTO in CPython's Lib/pickletools.py; PyTorch's notes on serialization (torch.save writes a zip
archive); docs/gguf.md of ggml; docs/spec.md of git-lfs.
"""

SUFFIXES = (".incomplete", ".aria2", ".part", ".crdownload", ".download")
"""Names that downloaders give to what is not complete, or keep beside it until it is.

Sources: huggingface_hub/file_download.py (``.incomplete``), the manual of aria2 ("Control File"); the others are those
of web browsers.
"""

MAX_LOOKED_AT = 10_000  # files in one folder: a message is not worth more


def other_format(start: bytes) -> str | None:
    """What a file is that begins with ``start`` and is not safetensors, with what to do; None for an unknown one."""
    return next((text for magic, text in FORMATS if start.startswith(magic)), None)


def unfinished(folder: Path) -> list[str]:
    """Names of unfinished downloads that may belong to ``folder``: in it, and where huggingface_hub keeps its own.

    That is ``.cache/huggingface/download`` of the folder which is downloaded to, and ``blobs`` beside ``snapshots`` in
    its cache (guide "Understand caching" of huggingface_hub).
    """
    found = set()
    try:
        for place, pattern in _places(folder.absolute()):
            found |= {path.name for path in islice(place.glob(pattern), MAX_LOOKED_AT) if path.suffix in SUFFIXES}
    except OSError:  # a folder that may not be listed: the message does without
        pass
    return sorted(found)


def download_control(file: Path) -> Path | None:
    """The file that says that ``file`` is not complete though it may have its final size; None without one."""
    control = file.with_name(f"{file.name}.aria2")
    return control if control.exists() else None


def _places(folder: Path) -> Iterator[tuple[Path, str]]:
    yield folder, "*"
    for above in (folder, *folder.parents[:4]):
        yield above / ".cache/huggingface/download", "**/*"
        if above.name == "snapshots":
            yield above.parent / "blobs", "*"
