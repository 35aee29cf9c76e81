"""Forms of H3 files that are known and not read: refused by name, from keys and file names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from comfyui_h3.h3core.errors import CheckpointError

_FILES = {
    ".gguf": "a GGUF file",
    **dict.fromkeys((".pt", ".pth", ".ckpt", ".bin", ".pkl"), "a pickle, which can run code when it is opened"),
}
# Names that the quantisers and pruners of H3 write: ComfyUI (comfy_quant, weight_scale, adaln_t_table), diffusers
# (bitsandbytes), SGLang and FastVideo (folded_bias, adaln_basis), nunchaku (qweight, wscales, smooth_factor).
_KEYS = tuple(
    (re.compile(pattern), form)
    for pattern, form in (
        (r"(.*\.)?adaln_t_table|(.*\.)?time_embedder\.table|.*\.folded_bias", "a pruned AdaLN curve"),
        (r"(.*\.)?adaln_(basis|mean)(\.weight)?", "a low-rank AdaLN"),
        (r".*\.(qweight|wscales|smooth_factor(_orig)?|wcscales)", "an SVDQuant file"),
        (r".*\.weight\.(absmax|quant_map|quant_state\..*|nested_.*)", "a bitsandbytes file"),
        (r".*\.comfy_quant", "a quantised ComfyUI file (comfy_quant)"),
        (
            r"(.*\.)?scaled_fp8|.*\.(scale_weight|scale_input|weight_scale(_inv|_2)?|input_scale)",
            "a file scaled to 8 bits",
        ),
    )
)


def refuse_unsupported(keys: Iterable[str], path: Path) -> None:
    """Raises CheckpointError naming the form, and a key that shows it."""
    check_file_name(path)
    for key in sorted(keys):
        for pattern, form in _KEYS:
            if pattern.fullmatch(key):
                raise CheckpointError(
                    f"{path} is {form}, as {key} shows; this version does not read that: take the bfloat16 file, and "
                    "precision=fp8 for half the memory"
                )


def check_file_name(path: Path) -> None:
    """Raises CheckpointError for a file of a kind that is not read."""
    form = _FILES.get(path.suffix.lower())
    if form is not None and not path.is_dir():
        raise CheckpointError(f"{path} is {form}; this version reads .safetensors files only")
