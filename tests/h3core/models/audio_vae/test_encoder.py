"""The encoding half of the audio VAE: lengths, padding, the mean."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.models.audio_vae.encoder import AudioEncoder, PooledAttention, encode
from comfyui_h3.tests.oracle.vae_oracle import randomize, tiny_audio_config


@pytest.fixture(scope="module")
def encoder():
    model = AudioEncoder(tiny_audio_config())
    randomize(model, 0)
    model.fold_weight_norm()
    return model


def samples(length, seed=0):
    return 0.3 * torch.randn(2, length, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("length", "num_latents"), [(1, 1), (800, 1), (801, 2), (4000, 5)])
def test_a_latent_is_800_samples_and_the_rest_is_silence(encoder, length, num_latents):
    sound = samples(length)
    latents = encode(encoder, sound)
    assert latents.shape == (2, 32, num_latents)
    assert torch.equal(latents, encode(encoder, F.pad(sound, (0, 800 * num_latents - length))))


def test_equal_channels_give_equal_latents_and_every_call_the_same(encoder):
    sound = samples(1600)[:1].expand(2, -1)
    latents = encode(encoder, sound)
    assert torch.equal(latents[0], latents[1])
    assert torch.equal(latents, encode(encoder, sound))


def test_the_latents_are_the_mean_normalised_per_channel(encoder):
    config = encoder.config
    sound = samples(1600)
    with torch.no_grad():
        mean = encoder(sound[:, None])
    wanted = (mean - torch.tensor(config.latents_mean)[:, None]) / torch.tensor(config.latents_std)[:, None]
    torch.testing.assert_close(encode(encoder, sound), wanted, rtol=0, atol=2e-6)


def test_the_spread_of_the_posterior_is_kept_and_never_evaluated(encoder):
    wanted = encode(encoder, samples(800))
    weight = encoder.logs_proj.weight.detach().clone()
    with torch.no_grad():
        encoder.logs_proj.weight.fill_(float("nan"))
        latents = encode(encoder, samples(800))
        encoder.logs_proj.weight.copy_(weight)
    assert torch.equal(latents, wanted)


def test_attention_is_causal_and_averages_heads_then_neighbouring_channels():
    config = replace(tiny_audio_config(), latent_channels=8, num_heads=2)  # heads of 128, pooled by 16
    attention = PooledAttention(config)
    randomize(attention, 0)
    x = torch.randn(1, 4, 256, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        out = attention(x)
        changed = x.clone()
        changed[:, 2:] = 0
        torch.testing.assert_close(attention(changed)[:, :2], out[:, :2], rtol=0, atol=1e-6)
        # The first row attends to itself alone: its output is its v.
        v = F.linear(x[:, 0], attention.qkv.weight[512:], attention.v_bias)
        pooled = v.view(1, 2, 8, 16).mean(dim=(1, 3))
        torch.testing.assert_close(out[:, 0], attention.proj(pooled), rtol=0, atol=1e-5)


def test_an_empty_waveform_is_refused(encoder):
    with pytest.raises(RequestError, match="without samples"):
        encode(encoder, torch.zeros(2, 0))
