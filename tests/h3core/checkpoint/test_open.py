"""Damaged and mistaken checkpoints are refused from their headers, with the file and the remedy named."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from comfyui_h3.h3core.checkpoint.index import read_header, read_index
from comfyui_h3.h3core.checkpoint.official import Checkpoint
from comfyui_h3.h3core.errors import CheckpointError

CPU = torch.device("cpu")


def every(key):
    return True


@pytest.fixture
def copy(tiny_h3, tmp_path):
    """A copy of FL2VA that a test may damage."""
    return shutil.copytree(tiny_h3 / "FL2VA", tmp_path / "model" / "FL2VA").parent


def edit_json(path, change):
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def first_line(info):
    return str(info.value).splitlines()[0]


def refused(root, partition="fl2va"):
    with pytest.raises(CheckpointError) as info:
        Checkpoint.open(root, partition)
    return first_line(info)


def test_the_folder_above_and_the_partition_itself_open(copy):
    assert Checkpoint.open(copy, "fl2va").folder == copy / "FL2VA"
    assert Checkpoint.open(copy / "FL2VA", "fl2va").folder == copy / "FL2VA"


def test_symlinked_components_open(copy, tmp_path):
    (copy / "FL2VA" / "video_vae").rename(tmp_path / "elsewhere")
    (copy / "FL2VA" / "video_vae").symlink_to(tmp_path / "elsewhere")
    assert Checkpoint.open(copy, "fl2va").video_decoder.entries


def test_missing_shard_is_named(copy):
    os.remove(copy / "FL2VA/transformer/model-00002-of-00003.safetensors")
    message = refused(copy)
    assert "model-00002-of-00003.safetensors" in message
    assert "download" in message


def test_shards_of_layers_behind_the_tap_need_not_be_there(copy):
    folder = copy / "FL2VA/text_encoder"
    index = folder / "model.safetensors.index.json"
    kept = {}
    for file in sorted(folder.glob("*.safetensors")):
        kept |= load_file(file)
    dropped = {key: kept.pop(key) for key in list(kept) if ".layers.5." in key or key == "lm_head.weight"}
    save_file(kept, folder / "model-00001-of-00002.safetensors")
    (folder / "model-00002-of-00002.safetensors").unlink()
    weight_map = dict.fromkeys(kept, "model-00001-of-00002.safetensors")
    weight_map |= dict.fromkeys(dropped, "model-00002-of-00002.safetensors")
    edit_json(index, lambda values: values.update(weight_map=weight_map))
    states = Checkpoint.open(copy, "fl2va").load_text_encoder(CPU, torch.bfloat16).state_dict()
    assert torch.equal(
        states["model.language_model.embed_tokens.weight"], kept["model.language_model.embed_tokens.weight"]
    )


@pytest.mark.parametrize("keep", [-1, 5000, 200, 4, 0])
def test_truncated_shard_is_named(copy, keep):
    shard = copy / "FL2VA/transformer/model-00001-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    message = refused(copy)
    assert "model-00001-of-00003.safetensors" in message
    assert "download it again" in message


def test_file_that_is_not_safetensors_is_refused(copy):
    (copy / "FL2VA/audio_vae/model.safetensors").write_bytes(b"<html>" * 100)
    assert "not a safetensors file" in refused(copy)


def test_index_naming_a_key_that_no_shard_has(copy):
    index = copy / "FL2VA/transformer/model.safetensors.index.json"
    edit_json(index, lambda v: v["weight_map"].update({"blocks.9.extra": "model-00001-of-00003.safetensors"}))
    message = refused(copy)
    assert "blocks.9.extra" in message
    assert "model-00001-of-00003.safetensors" in message


def test_index_pointing_outside_its_folder(copy):
    index = copy / "FL2VA/transformer/model.safetensors.index.json"
    edit_json(index, lambda v: v["weight_map"].update({"rope.inv_freq": "../text_encoder/x.safetensors"}))
    assert "outside its folder" in refused(copy)


def test_missing_key_is_named(copy):
    index = copy / "FL2VA/transformer/model.safetensors.index.json"
    edit_json(index, lambda v: v["weight_map"].pop("blocks.1.mlp.fc2.weight"))
    assert "lacks blocks.1.mlp.fc2.weight" in refused(copy)


def test_wrong_shape_is_named(copy):
    shard = copy / "FL2VA/transformer/model-00001-of-00003.safetensors"
    tensors = load_file(shard)
    tensors["video_patch_proj.weight"] = torch.zeros(64, 95)
    save_file(tensors, shard)
    message = refused(copy)
    assert "video_patch_proj.weight" in message
    assert "[64, 95]" in message
    assert "[64, 96]" in message


def test_unknown_storage_dtype_is_named(copy):
    file = copy / "FL2VA/audio_vae/model.safetensors"
    tensors = load_file(file)
    tensors["dec_in_proj.bias"] = tensors["dec_in_proj.bias"].to(torch.int8)
    save_file(tensors, file)
    message = refused(copy)
    assert "dec_in_proj.bias" in message
    assert "int8" in message


@pytest.mark.parametrize("name", ["video_patch_proj.weight", "blocks.0.attn.qkv_proj.weight"])
def test_transformer_in_float16_is_refused(copy, name):
    """Its values leave the range of float16, and its first and last layers are float32 in every file."""
    shard = copy / "FL2VA/transformer/model-00001-of-00003.safetensors"
    tensors = load_file(shard)
    tensors[name] = tensors[name].half()
    save_file(tensors, shard)
    message = refused(copy)
    assert f"{name} is stored as float16" in message
    assert "float32" in message


@pytest.mark.parametrize(
    ("file", "keys", "value"),
    [
        ("text_encoder/config.json", ["text_config"], None),
        ("text_encoder/config.json", ["text_config"], "x"),
        ("text_encoder/config.json", ["vision_config"], {}),
        ("text_encoder/config.json", ["text_config", "hidden_size"], "128"),
        ("text_encoder/config.json", ["text_config", "num_attention_heads"], 0),
        ("text_encoder/config.json", ["text_config", "num_hidden_layers"], -1),
        ("model_index.json", ["_minimax_h3", "sigma_shift_scales"], [12, 3]),
        ("model_index.json", ["_minimax_h3", "sigma_shift_scales"], {"video": float("nan"), "audio": 3}),
        ("model_index.json", ["_minimax_h3", "sigma_shift_scales"], {"video": 12, "audio": -3}),
        ("model_index.json", ["_minimax_h3", "text_encoder_tap"], "5"),
        ("model_index.json", ["_minimax_h3"], None),
        ("video_vae/config.json", ["latents_mean"], None),
        ("video_vae/config.json", ["latents_std"], ["1"]),
        ("video_vae/source/config.json", ["vit_decoder_kwargs"], None),
        ("video_vae/source/config.json", ["ch"], "32"),
        ("audio_vae/metadata.json", ["metadata"], None),
        ("audio_vae/metadata.json", ["metadata", "kwargs", "decoder_rates"], "55"),
        ("transformer/config.json", ["hidden_size"], "64"),
        ("transformer/config.json", ["num_layers"], -4),
        ("transformer/config.json", ["norm_eps"], float("inf")),
        ("transformer/config.json", ["rope_theta"], 5),
        ("transformer/model.safetensors.index.json", ["weight_map"], []),
        ("transformer/model.safetensors.index.json", ["weight_map", "rope.inv_freq"], 7),
    ],
)
def test_malformed_config_is_refused_by_file_and_key(copy, file, keys, value):
    def change(values):
        for key in keys[:-1]:
            values = values[key]
        values[keys[-1]] = value

    edit_json(copy / "FL2VA" / file, change)
    assert file.rpartition("/")[2] in refused(copy) or keys[-1] in refused(copy)


def test_other_partition_is_refused_with_the_choice(copy):
    message = refused(copy / "FL2VA", "ref2va")
    assert "fl2va" in message
    assert "ref2va" in message


@pytest.mark.parametrize("make", ["nothing", "file", "empty", "component"])
def test_wrong_folder_is_refused(tmp_path, copy, make):
    root = tmp_path / "wrong"
    if make == "file":
        root.write_text("x")
    elif make == "empty":
        root.mkdir()
    elif make == "component":
        root = copy / "FL2VA" / "transformer"
    assert "FL2VA" in refused(root)


def test_missing_ref2va_says_what_is_there(copy):
    assert "only FL2VA/" in refused(copy, "ref2va")


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
def test_broken_config_is_refused(copy, text):
    (copy / "FL2VA/transformer/config.json").write_text(text)
    assert "config.json" in refused(copy)


@pytest.mark.parametrize(
    "file",
    [
        "tokenizer/tokenizer_config.json",
        "processor/preprocessor_config.json",
        "processor/video_preprocessor_config.json",
    ],
)
def test_missing_small_file_is_named_before_any_weight_is_read(copy, file):
    (copy / "FL2VA" / file).unlink()
    assert file in refused(copy)


def test_missing_config_value_is_named(copy):
    edit_json(copy / "FL2VA/transformer/config.json", lambda v: v.pop("ffn_hidden_size"))
    assert "ffn_hidden_size" in refused(copy)


def test_encoder_with_too_few_layers_is_refused(copy):
    edit_json(copy / "FL2VA/model_index.json", lambda v: v["_minimax_h3"].pop("text_encoder_tap"))
    message = refused(copy)
    assert "6 text layers" in message
    assert "layer 50" in message


def test_opening_reads_no_weights(tiny_h3, monkeypatch):
    from comfyui_h3.h3core.checkpoint import loader

    monkeypatch.setattr(loader, "read_ahead", lambda *a, **k: pytest.fail("weights were opened"))
    Checkpoint.open(tiny_h3, "fl2va")


def test_headers_agree_with_the_library(tiny_h3):
    file = tiny_h3 / "FL2VA/video_vae/source/model.safetensors"
    tensors, entries = load_file(file), read_header(file)
    assert entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert entries[name].shape == tuple(tensor.shape)
        assert entries[name].dtype == tensor.dtype


def test_every_weight_of_the_file_reaches_the_model(tiny_h3):
    checkpoint = Checkpoint.open(tiny_h3, "fl2va")
    dit = checkpoint.load_dit(CPU, torch.bfloat16).state_dict()
    dit |= checkpoint.modulator.fill(checkpoint.new_modulator(torch.bfloat16), CPU, None).state_dict()
    shards = {}
    for file in (tiny_h3 / "FL2VA/transformer").glob("*.safetensors"):
        shards |= load_file(file)
    assert dit.keys() == shards.keys() == read_index(tiny_h3 / "FL2VA/transformer", every).keys()
    for name, tensor in shards.items():
        assert dit[name].dtype == tensor.dtype
        if not name.endswith("qkv_proj.weight"):
            assert torch.equal(dit[name], tensor), name


def test_fused_qkv_rows_are_stacked_on_the_way(tiny_h3):
    name = "blocks.2.attn.qkv_proj.weight"
    entry = read_index(tiny_h3 / "FL2VA/transformer", every)[name]
    file = load_file(entry.file)[name]
    loaded = Checkpoint.open(tiny_h3, "fl2va").load_dit(CPU, torch.bfloat16).state_dict()[name]
    head, channel = 5, 7
    for part in range(3):
        assert torch.equal(loaded[part * 56 * 32 + head * 32 + channel], file[(head * 3 + part) * 32 + channel])


def test_file_that_changed_after_it_was_opened_is_refused(copy):
    checkpoint = Checkpoint.open(copy, "fl2va")
    shard = copy / "FL2VA/transformer/model-00001-of-00003.safetensors"
    tensors = load_file(shard)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, shard)
    with pytest.raises(CheckpointError, match=r"00001.*was changed.*Load H3"):
        checkpoint.load_dit(CPU, torch.bfloat16)


def test_header_that_the_library_refuses_is_refused_at_once(copy):
    file = copy / "FL2VA/audio_vae/model.safetensors"
    file.write_bytes(file.read_bytes() + b"more")
    assert "model.safetensors" in refused(copy)


def test_loaded_weights_do_not_follow_the_file(copy):
    """safetensors maps files: a module must keep its weights when the file is replaced under it."""
    dit = Checkpoint.open(copy, "fl2va").load_dit(CPU, torch.bfloat16)
    before = dit.condition_proj.weight.clone()
    for file in (copy / "FL2VA/transformer").glob("*.safetensors"):
        with file.open("r+b") as stream:
            stream.seek(file.stat().st_size // 2)
            stream.write(b"\x00" * (file.stat().st_size // 2))
    assert torch.equal(dit.condition_proj.weight, before)
