"""Files that diffusers writes load here, and files written here load there: the same weights, tensor for tensor."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from comfyui_h3.h3core.checkpoint.official import Checkpoint
from comfyui_h3.h3core.config import ComponentSource
from comfyui_h3.h3core.tiny import configs, write_comfyui
from comfyui_h3.h3core.tiny.write_diffusers import write_diffusers
from comfyui_h3.tests.oracle.pipeline_oracle import load_model

pytestmark = [pytest.mark.oracle]

CPU = torch.device("cpu")
CLASSES = {
    "transformer": "MiniMaxH3Transformer3DModel",
    "transformer_ref": "MiniMaxH3Transformer3DModel",
    "vae": "AutoencoderKLMiniMaxH3",
    "audio_vae": "AutoencoderKLMiniMaxH3Audio",
}


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ours") / "h3"
    write_diffusers(folder)
    return folder


def load(folder, name):
    import diffusers

    return load_model(getattr(diffusers, CLASSES[name]), folder / name)


@pytest.fixture(scope="module")
def theirs(ours, tmp_path_factory):
    """The same folder with every model written again by the library that owns its layout, in small shards."""
    from transformers import Qwen3VLForConditionalGeneration

    folder = tmp_path_factory.mktemp("theirs") / "h3"
    shutil.copytree(ours, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json"))
    for name in CLASSES:
        (folder / name / "config.json").unlink()
        load(ours, name).save_pretrained(folder / name, max_shard_size="300KB")
    encoder = Qwen3VLForConditionalGeneration.from_pretrained(ours / "text_encoder", dtype=torch.bfloat16)
    (folder / "text_encoder/config.json").unlink()
    encoder.save_pretrained(folder / "text_encoder")
    return folder


def states_of(checkpoint):
    """Every parameter that is read of a checkpoint."""
    states = {f"dit.{name}": tensor for name, tensor in checkpoint.load_dit(CPU, torch.bfloat16).state_dict().items()}
    for part in (
        checkpoint.load_text_encoder(CPU, torch.bfloat16),
        checkpoint.load_video_encoder(CPU),
        checkpoint.load_video_decoder(CPU, torch.float32),
        checkpoint.load_audio_encoder(CPU),
        checkpoint.load_audio_decoder(CPU),
    ):
        states |= {f"{type(part).__name__}.{name}": tensor for name, tensor in part.state_dict().items()}
    return states


@pytest.mark.parametrize("partition", ["fl2va", "ref2va"])
def test_what_save_pretrained_writes_is_the_release(theirs, tiny_h3, partition):
    written, release = (states_of(Checkpoint.open(folder, partition)) for folder in (theirs, tiny_h3))
    assert written.keys() == release.keys()
    differ = {name for name in release if not torch.equal(written[name], release[name])}
    assert differ == {name for name in release if name.endswith("decoder.mask_token")}  # of training; not in there


def test_modulation_of_what_save_pretrained_writes(theirs, tiny_h3):
    groups = [torch.tensor([0.1, 0.9]), torch.tensor([0.5])]
    tables = [
        Checkpoint.open(folder, "fl2va").read_modulation(groups, CPU, torch.bfloat16) for folder in (theirs, tiny_h3)
    ]
    for one, other in zip(tables[0].blocks, tables[1].blocks, strict=True):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(one, other, strict=True))


@pytest.mark.parametrize("name", CLASSES)
def test_diffusers_finds_every_tensor_of_ours(ours, name):
    """It loads strictly: a tensor that one side does not know is an error."""
    stored = {}
    for file in sorted((ours / name).glob("*.safetensors")):
        stored |= load_file(file)
    state = load(ours, name).state_dict()
    assert state.keys() == stored.keys()
    assert all(torch.equal(state[key], stored[key].to(state[key].dtype)) for key in state)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_converter_of_diffusers_reads_our_single_file_as_we_do(tiny_h3, tmp_path, interleaved):
    from diffusers.loaders.single_file_utils import convert_minimax_h3_transformer_checkpoint_to_diffusers as convert

    single = write_comfyui.transformer_file(0, "fl2va", interleaved=interleaved)
    write_comfyui.save(single, tmp_path / "single.safetensors")
    config = {name: configs.TRANSFORMER[name] for name in ("num_attention_heads", "attention_head_dim")}
    converted = convert(dict(single), config, qkv_layout="interleaved" if interleaved else "stacked")
    write_comfyui.save(converted, tmp_path / "converted.safetensors")
    states = [
        Checkpoint.open(tiny_h3, "fl2va", [ComponentSource(component="transformer", path=tmp_path / file)])
        .load_dit(CPU, torch.bfloat16)
        .state_dict()
        for file in ("single.safetensors", "converted.safetensors")
    ]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
