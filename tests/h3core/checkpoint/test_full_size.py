"""The real checkpoint's tensors: what our modules want, built without memory, is what the released files hold."""

import json
import math

import pytest
import torch

from comfyui_h3.h3core.checkpoint.diffusers_folder import audio_vae_config, dit_config, video_vae_config
from comfyui_h3.h3core.checkpoint.keymap import diffusers_dit, diffusers_video_vae, official_text_encoder
from comfyui_h3.h3core.checkpoint.loader import build
from comfyui_h3.h3core.config import PARTITIONS, TRANSFORMERS
from comfyui_h3.h3core.models.audio_vae.config import AudioVAEConfig
from comfyui_h3.h3core.models.audio_vae.decoder import AudioDecoder
from comfyui_h3.h3core.models.audio_vae.encoder import AudioEncoder
from comfyui_h3.h3core.models.dit.adaln import Modulator
from comfyui_h3.h3core.models.dit.config import DiTConfig
from comfyui_h3.h3core.models.dit.model import DiT
from comfyui_h3.h3core.models.text_encoder.config import TextEncoderConfig
from comfyui_h3.h3core.models.text_encoder.encoder import TextEncoder
from comfyui_h3.h3core.models.video_vae.config import VideoVAEConfig
from comfyui_h3.h3core.models.video_vae.decoder import VideoDecoder
from comfyui_h3.h3core.models.video_vae.encoder import VideoEncoder


def num_bytes(state):
    return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in state.values())


def read(path):
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def partition(official_data):
    return official_data / "FL2VA"


def transformer_state(config):
    dit = build(lambda: DiT(config), torch.bfloat16).state_dict()
    modulator = build(lambda: Modulator(config), torch.bfloat16).state_dict()
    assert not dit.keys() & modulator.keys()
    return dit | modulator


def test_dit_has_the_released_535_tensors_and_bytes():
    state = transformer_state(DiTConfig())
    assert len(state) == 535
    assert num_bytes(state) == 66_280_430_144
    assert all(tensor.device.type == "meta" for tensor in state.values())
    assert state["blocks.49.attn.qkv_proj.weight"].shape == (21504, 5376)
    assert state["blocks.0.adaln_proj.linear.weight"].dtype == torch.bfloat16
    float32 = {name.split(".")[0] for name, tensor in state.items() if tensor.dtype == torch.float32}
    assert float32 == {"video_patch_proj", "audio_patch_proj", "time_embedder", "rope", "final_layer"}


def test_two_fifths_of_the_weights_see_timesteps_only():
    modulator = build(lambda: Modulator(DiTConfig()), torch.bfloat16)
    blocks = 50 * 18 * 5376 * (2688 + 1) * 2
    final = 2 * 5376 * (2688 + 1) * 2
    embedder = (5376 * (256 + 1) + 2688 * (5376 + 1)) * 4  # stays float32
    assert num_bytes(modulator.state_dict()) == blocks + final + embedder
    table = modulator.blocks[0].adaln_proj.linear
    assert table.weight.shape == (3 * 6 * 5376, 2688)


@pytest.mark.parametrize("name", ["FL2VA", "Ref2VA"])
def test_dit_names_are_those_of_the_index(official_data, name):
    folder = official_data / name / "transformer"
    index = read(folder / "model.safetensors.index.json")
    config = DiTConfig.from_dict(read(folder / "config.json"), "config.json")
    state = transformer_state(config)
    assert config == DiTConfig()
    assert set(state) == set(index["weight_map"])
    assert num_bytes(state) == index["metadata"]["total_size"]


@pytest.mark.parametrize("partition", ["fl2va", "ref2va"])
def test_configs_of_diffusers_are_those_of_the_release(official_data, partition):
    """Of the folder beside FL2VA/ and Ref2VA/ in the same release; its text encoder is theirs."""
    folder, release = official_data / "diffusers", official_data / PARTITIONS[partition]
    names = TRANSFORMERS[partition], "vae", "audio_vae"
    dit, video, audio = (read(folder / name / "config.json") for name in names)
    vae, sound = release / "video_vae", release / "audio_vae"
    assert dit_config(dit, "config.json") == DiTConfig()
    assert video_vae_config(video, "config.json") == VideoVAEConfig.from_dicts(
        read(vae / "config.json"), read(vae / "source/config.json")
    )
    assert audio_vae_config(audio, "config.json") == AudioVAEConfig.from_dicts(
        read(sound / "config.json"), read(sound / "metadata.json")
    )


@pytest.mark.parametrize("name", ["transformer", "transformer_ref"])
def test_names_of_diffusers_are_parameters_of_the_dit(official_data, name):
    keys = read(official_data / "diffusers" / name / "diffusion_pytorch_model.safetensors.index.json")["weight_map"]
    table = diffusers_dit(DiTConfig().rope_inv_freq_len)
    assert len(keys) == 638
    assert {table.name(key) for key in keys} | table.derived.keys() == transformer_state(DiTConfig()).keys()


def test_names_of_diffusers_are_parameters_of_the_video_vae(official_data):
    keys = read(official_data / "diffusers/vae/diffusion_pytorch_model.safetensors.index.json")["weight_map"]
    config = video_vae_config(read(official_data / "diffusers/vae/config.json"), "config.json")
    state = build(lambda: VideoEncoder(config), torch.float32).state_dict()
    state |= build(lambda: VideoDecoder(config), torch.float32).state_dict()
    table = diffusers_video_vae(config.num_heads, config.head_dim)
    assert len(keys) == 703
    assert {table.name(key) for key in keys} | table.derived.keys() == state.keys()
    assert table.derived["decoder.mask_token"].shape == state["decoder.mask_token"].shape


def test_text_encoder_keeps_902_of_1058_tensors(partition):
    folder = partition / "text_encoder"
    keys = read(folder / "model.safetensors.index.json")["weight_map"]
    config = TextEncoderConfig.from_dict(read(folder / "config.json"), "config.json")
    keymap = official_text_encoder(config.tap, config.num_file_layers)
    kept = {key for key in keys if keymap.is_read(key)}
    state = build(lambda: TextEncoder(config), torch.bfloat16).state_dict()
    assert len(keys) == 1058
    assert len(kept) == 902
    assert set(state) == kept
    assert num_bytes(state) == 51_506_191_840


def test_video_vae_has_the_released_560_tensors(partition):
    folder = partition / "video_vae"
    config = VideoVAEConfig.from_dicts(read(folder / "config.json"), read(folder / "source/config.json"))
    state = build(lambda: VideoEncoder(config), torch.float32).state_dict()
    state |= build(lambda: VideoDecoder(config), torch.float32).state_dict()
    assert len(state) == 560
    assert num_bytes(state) == 4 * 2_603_871_032


def test_audio_vae_has_the_released_1087_tensors(partition):
    folder = partition / "audio_vae"
    config = AudioVAEConfig.from_dicts(read(folder / "config.json"), read(folder / "metadata.json"))
    state = build(lambda: AudioEncoder(config), torch.float32).state_dict()
    state |= build(lambda: AudioDecoder(config), torch.float32).state_dict()
    assert len(state) == 1087
    assert num_bytes(state) == 4 * 151_326_585
