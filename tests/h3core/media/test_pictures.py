"""Every form of picture a host can hand over, and the sizes of the release."""

import numpy as np
import pytest
import torch
from PIL import Image

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media.pictures import check_cover, cover, picture_from_images, reference_size, resize


def random_pixels(height, width, seed=0):
    return torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(1, 16, 16, 3), (16, 16, 3)])
def test_every_code_survives_the_way_through_a_host(shape):
    codes = torch.arange(768).remainder(256).to(torch.uint8).view(shape)
    pixels, notices = picture_from_images(codes.float() / 255)
    assert torch.equal(pixels, codes.view(16, 16, 3))
    assert notices == ()


def test_values_are_rounded_not_truncated():
    pixels, _ = picture_from_images(torch.full((1, 1, 3), 0.6 / 255))
    assert pixels.tolist() == [[[1, 1, 1]]]


def test_of_a_batch_the_first_is_used_with_a_notice():
    images = torch.stack([torch.full((4, 4, 3), value) for value in (0.0, 0.5, 1.0)])
    pixels, notices = picture_from_images(images)
    assert pixels.max() == 0
    assert notices == ("the picture is a batch of 3; only its first picture is used",)


def test_gray_becomes_three_equal_channels():
    gray = torch.rand(1, 64, 64, 1, generator=torch.Generator().manual_seed(0))
    pixels, notices = picture_from_images(gray)
    assert pixels.shape == (64, 64, 3)
    assert torch.equal(pixels, (gray[0] * 255).round().to(torch.uint8).expand(-1, -1, 3))
    assert notices == ()


@pytest.mark.parametrize("num_colours", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_alpha_is_put_on_white_with_a_notice(num_colours, dtype):
    images = torch.zeros(1, 1, 3, num_colours + 1)
    images[0, 0, :, -1] = torch.tensor([0.0, 51 / 255, 1.0])
    if dtype == torch.uint8:
        images = (images * 255).round().to(torch.uint8)
    pixels, notices = picture_from_images(images)
    assert pixels[0].tolist() == [[255] * 3, [204] * 3, [0] * 3]
    assert notices == ("the picture is partly transparent; it is put on white",)


def test_opaque_alpha_changes_nothing_and_is_not_mentioned():
    colours = random_pixels(5, 7)
    opaque = torch.cat([colours.float() / 255, torch.ones(5, 7, 1)], dim=-1)
    pixels, notices = picture_from_images(opaque)
    assert torch.equal(pixels, colours)
    assert notices == ()


def test_values_outside_0_to_1_are_clipped_with_a_notice():
    pixels, notices = picture_from_images(torch.tensor([-0.5, 0.2, 1.5]).view(1, 3, 1))
    assert pixels[0, :, 0].tolist() == [0, 51, 255]
    assert notices == ("the picture has values from -0.5 to 1.5; they are clipped to 0..1",)


def test_overshoot_that_rounds_away_is_not_mentioned():
    assert picture_from_images(torch.tensor([-1e-6, 1 + 1e-6]).view(1, 2, 1))[1] == ()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_are_taken(dtype):
    assert picture_from_images(torch.ones(2, 2, 3, dtype=dtype))[0].min() == 255


def test_a_picture_of_one_pixel_is_taken():
    assert picture_from_images(torch.ones(1, 1, 1, 3))[0].shape == (1, 1, 3)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_inf_are_refused(value):
    images = torch.zeros(1, 2, 2, 3)
    images[0, 1, 1, 1] = value
    with pytest.raises(RequestError, match="NaN or Inf"):
        picture_from_images(images)


@pytest.mark.parametrize("shape", [(4, 4), (4, 4, 5), (1, 1, 4, 4, 3), (3, 64, 65)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(RequestError, match=r"height, width, channels"):
        picture_from_images(torch.zeros(shape))


@pytest.mark.parametrize("shape", [(0, 4, 4, 3), (1, 0, 4, 3), (4, 0, 3)])
def test_nothing_is_refused(shape):
    with pytest.raises(RequestError, match="empty"):
        picture_from_images(torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint16, torch.bool])
def test_integers_of_unknown_white_are_refused(dtype):
    with pytest.raises(RequestError, match="convert it to floats"):
        picture_from_images(torch.zeros(2, 2, 3, dtype=dtype))


def test_the_host_s_picture_is_not_changed():
    images = torch.rand(1, 3, 3, 4, generator=torch.Generator().manual_seed(0)) * 2 - 0.5
    before = images.clone()
    picture_from_images(images)
    assert torch.equal(images, before)


@pytest.mark.parametrize("num_channels", [1, 3, 4])
def test_a_later_write_of_the_host_changes_nothing(num_channels):
    images = torch.full((1, 8, 8, num_channels), 200, dtype=torch.uint8)
    pixels, _ = picture_from_images(images)
    kept = pixels.clone()
    images.zero_()
    assert torch.equal(pixels, kept)
    assert pixels.is_contiguous()


def test_an_equal_size_is_not_copied():
    pixels = random_pixels(32, 64)
    assert resize(pixels, 64, 32) is pixels
    assert cover(pixels, 64, 32) is pixels


@pytest.mark.parametrize("size", [(64, 32), (32, 64), (96, 96), (33, 47), (1, 1), (400, 4)])
def test_cover_fills_the_canvas(size):
    width, height = size
    assert cover(torch.full((height, width, 3), 77, dtype=torch.uint8), 64, 96).unique().tolist() == [77]


@pytest.mark.parametrize("size", [(1, 8192), (8192, 1), (4, 2000)])
def test_a_picture_too_thin_to_cover_the_canvas_is_refused(size):
    width, height = size
    with pytest.raises(RequestError, match=rf"is {width}x{height}; to cover 1344x768 .*100 megapixels; crop it"):
        check_cover(width, height, 1344, 768)
    with pytest.raises(RequestError, match="100 megapixels"):
        cover(random_pixels(height, width), 1344, 768)


def test_a_panorama_may_cover_the_canvas():
    check_cover(4000, 40, 1344, 768)
    assert cover(random_pixels(40, 4000), 1344, 768).shape == (768, 1344, 3)
    with pytest.raises(RequestError, match=r"^keyframe 2 is 1x500"):
        check_cover(1, 500, 1344, 768, what="keyframe 2")


def test_cover_keeps_the_centre_and_the_ratio():
    pixels = torch.zeros(100, 300, 3, dtype=torch.uint8)
    pixels[:, 100:200] = 255
    covered = cover(pixels, 100, 100)
    assert covered.float().mean() > 250


@pytest.mark.parametrize(
    ("mode", "size", "expected"),
    [
        ("diffusers", (1920, 1080), (3648, 2048)),
        ("diffusers", (512, 512), (2048, 2048)),
        ("diffusers", (1, 1), (2048, 2048)),
        ("diffusers", (4000, 1000), (8192, 2048)),
        ("max", (1920, 1080), (1920, 1088)),
        ("max", (8000, 4000), (4096, 2048)),
        ("max", (10, 30), (32, 32)),
        ("match", (1344, 768), (1344, 768)),
        ("match", (2688, 1536), (1344, 768)),
        ("match", (640, 480), (640, 480)),
    ],
)
def test_reference_sizes_are_those_of_the_release(mode, size, expected):
    assert reference_size(*size, mode, 1344 * 768) == expected


@pytest.mark.parametrize("size", [(4000, 40), (401, 100), (100, 401)])
def test_a_reference_longer_than_4_to_1_is_refused(size):
    with pytest.raises(RequestError, match=rf"{size[0]}x{size[1]}.*crop"):
        reference_size(*size, "diffusers", 1344 * 768)


def test_an_unknown_reference_size_is_refused_with_the_known_ones():
    with pytest.raises(RequestError, match="diffusers, match, max"):
        reference_size(64, 64, "huge", 1344 * 768)


def diffusers_keyframes(first, last, width, height):
    from diffusers.image_processor import VaeImageProcessor
    from diffusers.modular_pipelines.minimax_h3.before_encoder import MiniMaxH3ResizeStep
    from diffusers.modular_pipelines.modular_pipeline import PipelineState

    class Components:
        image_processor = VaeImageProcessor(vae_scale_factor=16)

    state = PipelineState()
    images = {"image": first, "last_image": last}
    for name, pixels in images.items():
        state.set(name, None if pixels is None else Image.fromarray(pixels.numpy()))
    state.set("width", width)
    state.set("height", height)
    _, state = MiniMaxH3ResizeStep()(Components(), state)
    return [torch.from_numpy(np.array(image)) for image in state.get("keyframes")]


@pytest.mark.oracle
@pytest.mark.parametrize("size", [(64, 96), (201, 77), (333, 222), (31, 33), (500, 125), (96, 64)])
def test_keyframes_are_those_of_diffusers(size):
    width, height = 96, 64
    first, last = random_pixels(size[1], size[0]), random_pixels(size[0], size[1], seed=1)
    theirs = diffusers_keyframes(first, last, width, height)
    assert torch.equal(resize(first, width, height), theirs[0])
    assert torch.equal(cover(last, width, height), theirs[1])


@pytest.mark.oracle
def test_a_last_keyframe_alone_is_stretched_by_diffusers_too():
    last = random_pixels(50, 90)
    assert torch.equal(resize(last, 96, 64), diffusers_keyframes(None, last, 96, 64)[0])
