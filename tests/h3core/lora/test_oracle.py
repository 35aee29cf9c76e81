"""Our reading of every native form against diffusers' own conversion of it."""

import pytest
import torch

from comfyui_h3.h3core.lora.file import LoraFile
from comfyui_h3.h3core.lora.merge import Merge
from comfyui_h3.h3core.lora.patches import Base, plan
from comfyui_h3.tests.h3core.lora.lora_files import Lora, comfyui, kohya, make_factors, native

HEADS, HEAD_DIM, HIDDEN = 2, 128, 24  # heads as wide as the released ones: diffusers takes that width for granted
INNER = HEADS * HEAD_DIM
MODULES = {
    "attn.qkv_proj": (3 * INNER, HIDDEN),
    "attn.out_proj": (HIDDEN, INNER),
    "mlp.fc1": (2 * HIDDEN, HIDDEN),
    "mlp.fc2": (HIDDEN, HIDDEN),
    "adaln_proj.linear": (18 * HIDDEN, HIDDEN),
}
SIZES = {
    **{f"blocks.{i}.{name}": (*size, "") for i in range(2) for name, size in MODULES.items()},
    **{f"token_refiner.blocks.0.{name}": (*size, "") for name, size in list(MODULES.items())[:4]},
    "condition_proj": (HIDDEN, 40, ""),
    "video_patch_proj": (HIDDEN, 96, ""),
    "time_embedder.proj_in": (HIDDEN, 32, ""),
    "final_layer.adaln_proj.linear": (2 * HIDDEN, HIDDEN, ""),
    "final_layer.audio_out": (32, HIDDEN, ""),
}
BASE = Base(
    shapes={f"{name}.weight": (rows, columns) for name, (rows, columns, _) in SIZES.items()},
    num_heads=HEADS,
    head_dim=HEAD_DIM,
)
NATIVE_FORMS = {
    "official": native,
    "comfyui": comfyui,
    "kohya": kohya,
    "diffsynth": lambda factors: native(factors, ("lora_A.default.weight", "lora_B.default.weight")),
}


def changes(path):
    """Parameter -> what the file adds to it."""
    planned = plan(LoraFile.open(path), 1.0, BASE)
    assert not planned.report.ignored + planned.report.failed

    def zeros(names, dtypes):
        return ((name, torch.zeros(BASE.shapes[name], dtype=dtypes[name])) for name in names)

    read = Merge.of([planned], BASE)(zeros)
    return dict(read(BASE.shapes, dict.fromkeys(BASE.shapes, torch.float32)))


@pytest.mark.oracle
@pytest.mark.parametrize("family", NATIVE_FORMS)
def test_same_change_as_in_diffusers(tmp_path, family):
    from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_minimax_h3_lora_to_diffusers

    lora = NATIVE_FORMS[family](make_factors(7, SIZES))
    converted = Lora(tensors=_convert_non_diffusers_minimax_h3_lora_to_diffusers(dict(lora.tensors)))
    ours, theirs = (
        changes(one.save(tmp_path / f"{name}.safetensors")) for name, one in (("a", lora), ("b", converted))
    )
    for name, change in ours.items():
        assert change.abs().max() > 0
        torch.testing.assert_close(change, theirs[name], rtol=0, atol=float(1e-6 * theirs[name].abs().max()))
