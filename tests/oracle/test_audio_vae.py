"""Our audio VAE against diffusers on tiny random weights."""

import pytest
import torch
from torch.nn import functional as F

from comfyui_h3.h3core.models.audio_vae.decoder import AudioDecoder, decode
from comfyui_h3.h3core.models.audio_vae.encoder import AudioEncoder, encode
from comfyui_h3.tests.oracle.vae_oracle import diffusers_audio_vae, randomize, tiny_audio_config

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore::FutureWarning")]

# The reference encodes with plain (not fused) attention, which diffusers does not: 2.4e-7 of 2.5 was measured.
ENCODE_TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def models():
    config = tiny_audio_config()
    encoder, decoder = AudioEncoder(config), AudioDecoder(config)
    randomize(encoder, 1)
    randomize(decoder, 2)
    vae = diffusers_audio_vae(config, encoder.state_dict() | decoder.state_dict())
    encoder.fold_weight_norm()
    decoder.fold_weight_norm()
    return encoder, decoder, vae


def statistics(config):
    return torch.tensor(config.latents_mean)[:, None], torch.tensor(config.latents_std)[:, None]


@pytest.mark.parametrize("num_latents", [1, 2, 37])
def test_decode_with_folded_weights_equals_diffusers(models, num_latents):
    _, decoder, vae = models
    latents = torch.randn(2, 32, num_latents, generator=torch.Generator().manual_seed(num_latents))
    mean, std = statistics(decoder.config)
    with torch.no_grad():
        wanted = vae.decode(latents * std + mean).sample[:, 0]
    assert wanted.std() > 0.02
    assert wanted.abs().max() < 1, "saturated: the test would prove nothing"
    assert torch.equal(decode(decoder, latents), wanted)


@pytest.mark.parametrize("num_samples", [1, 800, 12345])
def test_encode_gives_the_mean_of_diffusers(models, num_samples):
    encoder, _, vae = models
    samples = 0.3 * torch.randn(2, num_samples, generator=torch.Generator().manual_seed(num_samples))
    mean, std = statistics(encoder.config)
    with torch.no_grad():
        posterior = vae.encode(F.pad(samples, (0, -num_samples % 800))[:, None]).latent_dist
    wanted = (posterior.mode() - mean) / std
    error = (encode(encoder, samples) - wanted).abs().max() / wanted.abs().max()
    assert error < ENCODE_TOLERANCE
