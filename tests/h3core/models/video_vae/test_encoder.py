"""The encoding half of the video VAE: names, clips, images, the posterior."""

import pytest
import torch

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.models.video_vae.config import VideoVAEConfig
from comfyui_h3.h3core.models.video_vae.decoder import VideoDecoder, denormalize_latents
from comfyui_h3.h3core.models.video_vae.encoder import (
    VideoEncoder,
    encode,
    encode_moments,
    normalize_latents,
    normalize_pixels,
    sample_posterior,
)
from comfyui_h3.h3core.models.video_vae.tiling import AxisPlan
from comfyui_h3.h3core.tiny import configs
from comfyui_h3.tests.oracle.vae_oracle import randomize, tiny_video_config


@pytest.fixture(scope="module")
def encoder():
    model = VideoEncoder(tiny_video_config(tile_size=32, tile_overlap=16))
    randomize(model, 0)
    return model


def pixels(num_frames, height=32, width=32, seed=0):
    return torch.rand(3, num_frames, height, width, generator=torch.Generator().manual_seed(seed))


def full_size_config():
    vit = {**configs.VIDEO_VAE_SOURCE["vit_decoder_kwargs"], "heads": 32, "dim_head": 64, "num_layers": 36}
    sizes = {"ch": 128, "ch_mult": [1, 2, 2, 4, 4, 8], "num_res_blocks": 2, "vit_decoder_kwargs": vit}
    return VideoVAEConfig.from_dicts(configs.VIDEO_VAE, configs.VIDEO_VAE_SOURCE | sizes)


def released_encoder_shapes():
    shapes = {}

    def conv(name, cout, cin, kernel):
        shapes.update({f"{name}.weight": (cout, cin, kernel, kernel, kernel), f"{name}.bias": (cout,)})

    def norm(name, width):
        shapes.update({f"{name}.weight": (width,), f"{name}.bias": (width,)})

    conv("encoder.conv_in", 128, 3, 3)
    before = 128
    for level, width in enumerate((128, 256, 256, 512, 512, 1024)):
        for r in range(2):
            block = f"encoder.down.{level}.block.{r}"
            cin = before if r == 0 else width
            norm(f"{block}.norm1", cin)
            conv(f"{block}.conv1", width, cin, 3)
            norm(f"{block}.norm2", width)
            conv(f"{block}.conv2", width, width, 3)
            if r == 0 and level in (1, 3, 5):
                conv(f"{block}.nin_shortcut", width, cin, 1)
        if level < 4:
            conv(f"encoder.down.{level}.downsample.conv", width, width, 3)
        before = width
    norm("encoder.norm_out", 1024)
    conv("encoder.conv_out", 48, 1024, 3)
    conv("quant_conv", 48, 48, 1)
    return shapes


def test_full_size_tensors_are_those_of_the_release():
    with torch.device("meta"):
        state = VideoEncoder(full_size_config()).state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == released_encoder_shapes()
    assert all(tensor.dtype == torch.float32 and tensor.is_meta for tensor in state.values())
    assert sum(tensor.numel() for tensor in state.values()) == 180_337_888


def test_both_halves_together_are_the_560_tensors_of_the_file():
    with torch.device("meta"):
        encoder, decoder = VideoEncoder(full_size_config()).state_dict(), VideoDecoder(full_size_config()).state_dict()
    assert not encoder.keys() & decoder.keys()
    both = encoder | decoder
    assert (len(both), sum(tensor.numel() for tensor in both.values())) == (560, 2_603_871_032)


@pytest.mark.parametrize(("num_frames", "num_latents"), [(1, 1), (5, 2), (17, 2), (18, 7)])
def test_latent_frames_of_a_video(encoder, num_frames, num_latents):
    latents = encode(encoder, pixels(num_frames))
    assert latents.shape == (24, num_latents, 2, 2)
    assert latents.dtype == torch.float32


def test_an_image_is_not_a_still_video(encoder):
    image = pixels(1)
    still = encode_moments(encoder, image.expand(-1, 2, -1, -1))
    assert encode_moments(encoder, image).shape[1] == 1
    assert still.shape[1] == 2
    # Causal: the first latent frame of a video sees its first frame only.
    torch.testing.assert_close(still[:, :1], encode_moments(encoder, image), rtol=0, atol=1e-5)


def test_later_frames_do_not_change_earlier_latents(encoder):
    video = pixels(10)
    changed = video.clone()
    changed[:, 5:] = 0
    assert torch.equal(encode_moments(encoder, video), encode_moments(encoder, changed))  # both keep 5 frames' worth


def test_clips_are_encoded_alone(encoder):
    video = pixels(22)
    other = torch.cat([pixels(17, seed=1), video[:, 17:]], dim=1)
    assert torch.equal(encode_moments(encoder, video)[:, 5:], encode_moments(encoder, other)[:, 5:])


def test_a_short_clip_is_filled_with_its_last_frame(encoder):
    video = pixels(3)
    filled = torch.cat([video, video[:, -1:].expand(-1, 14, -1, -1)], dim=1)
    assert torch.equal(encode_moments(encoder, video), encode_moments(encoder, filled))
    assert torch.equal(encode_moments(encoder, video, exact=True), encode_moments(encoder, filled, exact=True))


@pytest.mark.parametrize("num_frames", [5, 22, 39])
def test_the_last_clip_needs_its_first_five_frames_only(encoder, num_frames):
    video = pixels(num_frames)
    exact = encode_moments(encoder, video, exact=True)
    torch.testing.assert_close(encode_moments(encoder, video), exact, rtol=0, atol=1e-5)


def test_the_right_and_bottom_border_is_cut_to_multiples_of_16(encoder):
    image = pixels(1, 47, 63)
    assert torch.equal(encode_moments(encoder, image), encode_moments(encoder, image[..., :32, :48]))


@pytest.mark.parametrize(("num_frames", "height", "width"), [(1, 31, 64), (1, 64, 16), (0, 64, 64)])
def test_sizes_that_cannot_be_encoded_are_named(encoder, num_frames, height, width):
    with pytest.raises(RequestError, match=f"{width}x{height}, {num_frames} frames.*32 pixels"):
        encode(encoder, torch.zeros(3, num_frames, height, width))


def test_bytes_and_fractions_are_the_same_pixels(encoder):
    image = torch.randint(0, 256, (3, 1, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(encode(encoder, image), encode(encoder, image.float() / 255))
    red = normalize_pixels(torch.full((3, 1, 1, 1), 255, dtype=torch.uint8))[0].item()
    assert red == pytest.approx((1 - 0.485) / 0.229, abs=1e-6)


def test_tiles_in_batches_give_the_same_moments(encoder):
    image = pixels(1, 48, 80)
    torch.testing.assert_close(
        encode_moments(encoder, image, tile_batch=8), encode_moments(encoder, image), rtol=0, atol=1e-5
    )


def test_progress_counts_the_tiles_of_all_clips_and_may_cancel(encoder):
    calls = []
    encode(encoder, pixels(18, 32, 48), on_tile=lambda done, total: calls.append((done, total)))
    assert calls == [(done, 4) for done in range(5)]  # 1 x 2 tiles, 2 clips

    def cancel(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode(encoder, pixels(1), on_tile=cancel)


def test_the_draw_uses_seed_42_and_is_rounded_to_fp16():
    moments = torch.randn(48, 2, 3, 4, generator=torch.Generator().manual_seed(0)) * 20
    noise = torch.randn(1, 24, 2, 3, 4, generator=torch.Generator().manual_seed(42))[0]
    torch.manual_seed(7)  # the global generator is neither used nor moved
    expected_next = torch.rand(1, generator=torch.Generator().manual_seed(7))
    z = sample_posterior(moments)
    assert torch.equal(z, (moments[:24] + (0.5 * moments[24:].clamp(-30, 20)).exp() * noise).half().float())
    assert torch.equal(torch.rand(1), expected_next)


def test_normalisation_of_latents_is_undone_by_the_decoder():
    config = tiny_video_config()
    z = torch.randn(24, 2, 3, 4)
    torch.testing.assert_close(denormalize_latents(config, normalize_latents(config, z)), z)
    mean, std = torch.tensor(config.latents_mean[3]), torch.tensor(config.latents_std[3])
    assert normalize_latents(config, z)[3, 0, 0, 0] == (z[3, 0, 0, 0] - mean) / std


def stitched_by_hand(encoder, frames):
    """Moments of normalised pixels (3, F, H, W) joined cell by cell: each of a tile, its upper and its left one."""
    size, overlap = encoder.config.tile_size // 16, encoder.config.tile_overlap // 16
    height, width = frames.shape[2] // 16, frames.shape[3] // 16
    rows, cols = AxisPlan.cover(height, size, overlap), AxisPlan.cover(width, size, overlap)
    raw = {
        (i, j): encoder(frames[None, :, :, 16 * y : 16 * (y + rows.size), 16 * x : 16 * (x + cols.size)])[0]
        for i, y in enumerate(rows.starts)
        for j, x in enumerate(cols.starts)
    }
    out = torch.empty(48, raw[0, 0].shape[1], height, width)
    for y in range(height):
        for x in range(width):
            i = max(i for i, start in enumerate(rows.starts) if start <= y)
            j = max(j for j, start in enumerate(cols.starts) if start <= x)
            dy, dx = y - rows.starts[i], x - cols.starts[j]
            cell = raw[i, j][..., dy, dx]
            if i and dy < rows.overlaps[i - 1]:
                share = dy / rows.overlaps[i - 1]
                cell = raw[i - 1, j][..., y - rows.starts[i - 1], dx] * (1 - share) + cell * share
            if j and dx < cols.overlaps[j - 1]:
                share = dx / cols.overlaps[j - 1]
                cell = raw[i, j - 1][..., dy, x - cols.starts[j - 1]] * (1 - share) + cell * share
            out[..., y, x] = cell
    return out


@pytest.mark.parametrize(("num_frames", "height", "width"), [(1, 47, 63), (1, 50, 200), (5, 33, 100)])
def test_sizes_off_the_grid_equal_a_join_by_hand(encoder, num_frames, height, width):
    """diffusers keeps the border of such sizes, and the release cuts it: there is no other implementation to ask."""
    video = pixels(num_frames, height, width)
    cut = normalize_pixels(video[..., : height // 16 * 16, : width // 16 * 16])
    with torch.no_grad():
        wanted = stitched_by_hand(encoder, cut)
    torch.testing.assert_close(encode_moments(encoder, video), wanted, rtol=0, atol=1e-5)
