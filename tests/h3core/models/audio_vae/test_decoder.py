"""The decoding half of the audio VAE: names, lengths, channels."""

import math

import pytest
import torch

from comfyui_h3.h3core.errors import H3Error
from comfyui_h3.h3core.models.audio_vae.config import AudioVAEConfig
from comfyui_h3.h3core.models.audio_vae.decoder import AudioDecoder, decode
from comfyui_h3.h3core.models.audio_vae.encoder import AudioEncoder
from comfyui_h3.h3core.tiny import configs
from comfyui_h3.tests.oracle.vae_oracle import randomize, tiny_audio_config


@pytest.fixture(scope="module")
def decoder():
    model = AudioDecoder(tiny_audio_config())
    randomize(model, 0)
    model.fold_weight_norm()
    return model


def latents(num_latents, seed=0):
    return torch.randn(2, 32, num_latents, generator=torch.Generator().manual_seed(seed))


def full_size_config():
    sizes = {"encoder_dim": 64, "latent_dim": 2048, "decoder_dim": 1024}
    kwargs = configs.AUDIO_VAE_METADATA["metadata"]["kwargs"] | sizes
    return AudioVAEConfig.from_dicts(configs.AUDIO_VAE, {"metadata": {"kwargs": kwargs}})


def released_shapes():
    shapes: dict[str, tuple[int, ...]] = {}

    def normed(name, *v, bias):
        shapes[f"{name}.parametrizations.weight.original0"] = (v[0], 1, 1)
        shapes[f"{name}.parametrizations.weight.original1"] = v
        if bias is not None:
            shapes[f"{name}.bias"] = (bias,)

    def plain(name, *weight):
        shapes.update({f"{name}.weight": weight, f"{name}.bias": (weight[0],)})

    def activation(name, channels):
        shapes.update({f"{name}.act.{p}": (channels,) for p in ("alpha", "beta")})
        shapes.update({f"{name}.{p}.filter": (1, 1, 12) for p in ("upsample", "downsample.lowpass")})

    normed("encoder.block.0", 64, 1, 7, bias=64)
    for i, (d, kernel) in enumerate(((64, 4), (128, 8), (256, 8), (512, 10), (1024, 10)), start=1):
        for unit in range(3):
            name = f"encoder.block.{i}.block.{unit}.block"
            shapes.update({f"{name}.0.alpha": (1, d, 1), f"{name}.2.alpha": (1, d, 1)})
            normed(f"{name}.1", d, d, 7, bias=d)
            normed(f"{name}.3", d, d, 1, bias=d)
        shapes[f"encoder.block.{i}.block.3.alpha"] = (1, d, 1)
        normed(f"encoder.block.{i}.block.4", 2 * d, d, kernel, bias=2 * d)
    shapes["encoder.block.6.alpha"] = (1, 2048, 1)
    normed("encoder.block.7", 2048, 2048, 3, bias=2048)
    for name, width in (("norm1", 2048), ("norm3", 2048), ("norm2", 32), ("mlp.norm", 32)):
        shapes.update({f"pre_block.{name}.weight": (width,), f"pre_block.{name}.bias": (width,)})
    shapes["pre_block.attn.qkv.weight"] = (6144, 2048)
    shapes.update({f"pre_block.attn.{name}": (2048,) for name in ("q_bias", "v_bias", "zero_k_bias")})
    plain("pre_block.attn.proj", 32, 32)
    plain("pre_block.proj", 32, 2048)
    plain("pre_block.mlp.w0", 64, 32)
    plain("pre_block.mlp.w1", 64, 32)
    plain("pre_block.mlp.w2", 32, 64)
    plain("mean_proj", 32, 32, 1)
    plain("logs_proj", 32, 32, 1)
    plain("dec_in_proj", 2048, 32, 1)
    normed("decoder.conv_pre", 1024, 2048, 7, bias=1024)
    for i, kernel in enumerate((9, 9, 4, 4, 4, 4, 4)):
        normed(f"decoder.ups.{i}.0", 1024 >> i, 512 >> i, kernel, bias=512 >> i)
    for r in range(21):
        channels, kernel = 512 >> (r // 3), (3, 7, 11)[r % 3]
        for n in range(3):
            normed(f"decoder.resblocks.{r}.convs1.{n}", channels, channels, kernel, bias=channels)
            normed(f"decoder.resblocks.{r}.convs2.{n}", channels, channels, kernel, bias=channels)
        for n in range(6):
            activation(f"decoder.resblocks.{r}.activations.{n}", channels)
    activation("decoder.activation_post", 8)
    normed("decoder.conv_post", 1, 8, 7, bias=None)
    return shapes


def test_full_size_tensors_are_those_of_the_release():
    with torch.device("meta"):
        encoder, decoder = AudioEncoder(full_size_config()), AudioDecoder(full_size_config())
    state = encoder.state_dict() | decoder.state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == released_shapes()
    assert all(tensor.dtype == torch.float32 and tensor.is_meta for tensor in state.values())
    assert (len(state), sum(tensor.numel() for tensor in state.values())) == (1087, 151_326_585)
    assert all(name.startswith(("dec_in_proj.", "decoder.")) for name in decoder.state_dict())


def test_a_model_built_on_meta_runs_after_its_weights_are_there():
    source = AudioDecoder(tiny_audio_config())
    randomize(source, 0)
    with torch.device("meta"):
        built = AudioDecoder(source.config)
    built.load_state_dict(source.state_dict(), assign=True)
    built.fold_weight_norm()
    assert torch.equal(decode(built, latents(2)), decode(source, latents(2)))
    assert not any("parametrizations" in name for name in built.state_dict())


@pytest.mark.parametrize("num_latents", [1, 2, 9])
def test_every_latent_is_800_samples(decoder, num_latents):
    samples = decode(decoder, latents(num_latents))
    assert samples.shape == (2, 800 * num_latents)
    assert samples.dtype == torch.float32
    assert samples.abs().max() <= 1


def test_the_two_channels_are_decoded_alone(decoder):
    z = latents(3)
    swapped = decode(decoder, z.flip(0)).flip(0)
    torch.testing.assert_close(swapped, decode(decoder, z), rtol=0, atol=1e-6)
    assert not torch.allclose(swapped[0], swapped[1], atol=1e-4)


def test_loud_sound_is_clamped_not_wrapped(decoder):
    samples = decode(decoder, 1e3 * latents(2))
    assert samples.abs().max() == 1


def test_latents_are_denormalised_per_channel(decoder):
    config = decoder.config
    z = latents(2)
    raw = z * torch.tensor(config.latents_std)[:, None] + torch.tensor(config.latents_mean)[:, None]
    with torch.no_grad():
        assert torch.equal(decode(decoder, z), decoder(raw)[:, 0])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_an_error(decoder, value):
    z = latents(2)
    z[1, 4, 1] = value
    with pytest.raises(H3Error, match="not finite"):
        decode(decoder, z)


def test_impossible_latents_are_refused(decoder):
    for shape in ((2, 32), (2, 24, 3), (2, 32, 0)):
        with pytest.raises(ValueError, match="latents must be"):
            decode(decoder, torch.zeros(shape))
