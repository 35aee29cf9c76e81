"""What single keys mean; names as trainers and hosts write them."""

import time

import pytest

from comfyui_h3.h3core.lora.names import Names, other_method

MODULES = (
    "blocks.0.attn.qkv_proj",
    "blocks.0.attn.out_proj",
    "blocks.0.attn.q_norm",
    "blocks.0.mlp.fc1",
    "blocks.0.mlp.fc2",
    "blocks.0.norm1",
    "blocks.0.adaln_proj.linear",
    "token_refiner.blocks.1.attn.qkv_proj",
    "token_refiner.blocks.1.mlp.fc1",
    "token_refiner.final_norm",
    "video_patch_proj",
    "final_layer.adaln_proj.linear",
    "final_layer.video_out",
)
NAMES = Names(MODULES)
QKV, REFINER_QKV, FC1 = MODULES[0], MODULES[7], MODULES[3]


@pytest.mark.parametrize(
    ("key", "module", "role", "third", "order", "family"),
    [
        ("blocks.0.attn.qkv_proj.lora_A.weight", QKV, "down", None, "same", "official"),
        ("blocks.0.mlp.fc1.lora_B.weight", FC1, "up", None, "same", "official"),
        ("diffusion_model.blocks.0.mlp.fc1.lora_up.weight", FC1, "up", None, "same", "ComfyUI"),
        ("model.diffusion_model.blocks.0.norm1.diff", "blocks.0.norm1", "diff", None, "same", "ComfyUI"),
        ("diffusion_model.blocks.0.attn.q_norm.set_weight", MODULES[2], "set_weight", None, "same", "ComfyUI"),
        ("lora_unet_blocks_0_attn_qkv_proj.alpha", QKV, "alpha", None, "same", "kohya"),
        ("lora_unet_token_refiner_blocks_1_mlp_fc1.lora_down.weight", MODULES[8], "down", None, "same", "kohya"),
        ("lora_unet_final_layer_video_out.lora_up.weight", MODULES[12], "up", None, "same", "kohya"),
        ("lora_unet_transformer_blocks_0_attn_to_v.lora_up.weight", QKV, "up", 2, "same", "kohya"),
        ("transformer.transformer_blocks.0.attn.to_k.lora_A.weight", QKV, "down", 1, "same", "diffusers"),
        ("transformer_ref.transformer_blocks.0.attn.to_q.lora_B.weight", QKV, "up", 0, "same", "diffusers"),
        (
            "base_model.model.token_refiner.refiner_blocks.1.attn.to_q.lora_A.default.weight",
            *(REFINER_QKV, "down", 0, "same", "diffusers"),
        ),
        ("transformer_blocks.0.ff.net.0.proj.lora_B.default.weight", FC1, "up", None, "halves swapped", "diffusers"),
        ("transformer_blocks.0.ff.net.2.lora.down.weight", MODULES[4], "down", None, "same", "diffusers"),
        ("transformer_blocks.0.attn.to_out.0.diff_b", MODULES[1], "diff_b", None, "same", "diffusers"),
        ("norm_out.linear.lora_A.weight", "final_layer.adaln_proj.linear", "down", None, "same", "diffusers"),
        ("proj_in.lora_A.weight", "video_patch_proj", "down", None, "same", "diffusers"),
    ],
)
def test_key_is_read(key, module, role, third, order, family):
    found = NAMES.read(key)
    assert (found.target.module, found.role, found.target.third, found.target.order, found.family) == (
        *(module, role, third, order),
        family,
    )


@pytest.mark.parametrize(
    "key",
    [
        "blocks.1.attn.qkv_proj.lora_A.weight",
        "blocks.0.attn.to_q.lora_A.weight",
        "transformer_blocks.0.attn.qkv_proj.lora_A.weight",
        "lora_unet_blocks_0_attn.lora_down.weight",
        "lora_te_text_model_encoder_layers_0_mlp_fc1.lora_down.weight",
        "lora_unet_",
        "transformer.",
        ".",
        "",
    ],
)
def test_other_keys_are_of_no_module(key):
    assert NAMES.read(key).target is None


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("blocks.0.attn.qkv_proj.lora_B.default.weight", True),
        ("blocks.0.attn.qkv_proj.lora_B.weight", False),
        ("diffusion_model.blocks.0.attn.qkv_proj.lora_B.default.weight", False),
        ("blocks.0.mlp.fc1.lora_B.default.weight", False),
        ("transformer_blocks.0.attn.to_q.lora_B.default.weight", False),
    ],
)
def test_rows_per_head_are_told_by_the_infix_alone(key, expected):
    assert NAMES.read(key).is_interleaved is expected


@pytest.mark.parametrize(
    "key", ["transformer." * 10**5, "." * 10**6, "base_model.model.transformer." * 10**5, "a" * 10**6]
)
def test_keys_of_any_length_are_read_in_a_moment(key):
    started = time.monotonic()
    assert NAMES.read(key).target is None
    assert other_method([key]) is None
    assert time.monotonic() - started < 2
