"""Our video VAE against diffusers on tiny random weights."""

import pytest
import torch

from comfyui_h3.h3core.models.video_vae.decoder import VideoDecoder, decode, denormalize_latents, to_unit_range
from comfyui_h3.h3core.models.video_vae.encoder import (
    VideoEncoder,
    encode,
    encode_moments,
    normalize_latents,
    normalize_pixels,
)
from comfyui_h3.kernels.dispatch import backend
from comfyui_h3.tests.oracle.vae_oracle import diffusers_video_vae, randomize, tiny_video_config
from comfyui_h3.tests.tolerances import relative_error

pytestmark = pytest.mark.oracle

# 0.0 was measured; another CPU may add up one product of q, k and v in another order than three.
DECODE_TOLERANCE = 2e-6
# A convolution over 5 frames adds up in another order than one over 17; 1.4e-6 was measured.
ENCODE_TOLERANCE = 1e-5


def build(tile_size, tile_overlap):
    config = tiny_video_config(tile_size=tile_size, tile_overlap=tile_overlap)
    encoder, decoder = VideoEncoder(config), VideoDecoder(config)
    randomize(encoder, 1)
    randomize(decoder, 2)
    return encoder, decoder, diffusers_video_vae(config, encoder.state_dict() | decoder.state_dict())


@pytest.fixture(scope="module")
def small_tiles():
    return build(64, 16)


@pytest.fixture(scope="module")
def smallest_tiles():
    return build(32, 16)


@pytest.fixture(scope="module")
def official_tiles():
    return build(256, 64)


@torch.no_grad()
def oracle_decode(vae, config, latents):
    return to_unit_range(vae.decode(denormalize_latents(config, latents)[None]).sample[0])


@pytest.mark.parametrize("num_tokens", range(3, 13))
def test_decode_of_many_tiles_and_chunks_equals_diffusers(small_tiles, num_tokens):
    _, decoder, vae = small_tiles
    latents = torch.randn(24, num_tokens, 6, 11, generator=torch.Generator().manual_seed(num_tokens))
    wanted = oracle_decode(vae, decoder.config, latents)  # 2 x 4 tiles
    assert wanted.std() > 0.1
    assert (wanted.clamp(0.01, 0.99) == wanted).float().mean() > 0.8
    assert (torch.cat(list(decode(decoder, latents)), dim=1) - wanted).abs().max() <= DECODE_TOLERANCE


def test_decode_at_the_official_tile_size_equals_diffusers(official_tiles):
    _, decoder, vae = official_tiles
    latents = torch.randn(24, 7, 17, 18, generator=torch.Generator().manual_seed(0))
    wanted = oracle_decode(vae, decoder.config, latents)  # 2 x 2 tiles
    assert (torch.cat(list(decode(decoder, latents)), dim=1) - wanted).abs().max() <= DECODE_TOLERANCE


def test_decoder_of_one_tile_equals_diffusers_before_the_clamp(official_tiles):
    _, decoder, vae = official_tiles
    z = torch.randn(2, 24, 7, 3, 5, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = vae.decoder(vae.post_quant_conv(z))
        assert (decoder(z) - wanted).abs().max() <= DECODE_TOLERANCE * wanted.abs().max()


@pytest.mark.parametrize(
    ("num_frames", "height", "width"),
    [(1, 48, 80), (5, 48, 48), (22, 48, 48), (39, 32, 48)],  # 2 x 4, 2 x 2, 2 x 2, 1 x 2 tiles; 1, 1, 2, 3 clips
)
def test_moments_of_many_tiles_and_clips_equal_diffusers(smallest_tiles, num_frames, height, width):
    encoder, _, vae = smallest_tiles
    pixels = torch.rand(3, num_frames, height, width, generator=torch.Generator().manual_seed(num_frames))
    with torch.no_grad():
        wanted = vae.encode(normalize_pixels(pixels)[None]).latent_dist.parameters[0]
    assert wanted.std() > 0.1
    assert torch.equal(encode_moments(encoder, pixels, exact=True), wanted)
    assert relative_error(encode_moments(encoder, pixels), wanted) <= ENCODE_TOLERANCE


@pytest.mark.parametrize(("num_frames", "height", "width"), [(1, 48, 80), (22, 48, 48)])
def test_moments_of_float16_halves_equal_diffusers(smallest_tiles, num_frames, height, width):
    encoder, _, vae = smallest_tiles
    pixels = torch.rand(3, num_frames, height, width, generator=torch.Generator().manual_seed(num_frames))
    with torch.no_grad(), backend("torch"):
        wanted = vae.encode(normalize_pixels(pixels)[None]).latent_dist.parameters[0]
        moments = encode_moments(encoder, pixels, precision="split")
    assert relative_error(moments, wanted) <= ENCODE_TOLERANCE


def test_moments_of_an_image_at_the_official_tile_size_equal_diffusers(official_tiles):
    encoder, _, vae = official_tiles
    pixels = torch.rand(3, 1, 48, 272, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = vae.encode(normalize_pixels(pixels)[None]).latent_dist.parameters[0]
    assert torch.equal(encode_moments(encoder, pixels), wanted)


def test_latents_are_the_draw_of_seed_42_rounded_to_fp16(smallest_tiles):
    encoder, _, vae = smallest_tiles
    pixels = torch.rand(3, 5, 32, 48, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        posterior = vae.encode(normalize_pixels(pixels)[None]).latent_dist
    draw = posterior.sample(torch.Generator().manual_seed(42))[0].half().float()
    assert torch.equal(encode(encoder, pixels, exact=True), normalize_latents(encoder.config, draw))
