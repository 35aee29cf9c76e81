"""Rounding of pixels to 8 bits."""

import pytest
import torch

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media.frames import CHUNK, images_to_uint8, to_uint8


def test_values_are_rounded_not_truncated():
    values = torch.tensor([0.0, 0.5 / 255 - 1e-6, 0.5 / 255 + 1e-6, 254.6 / 255, 1.0])
    assert to_uint8(values).tolist() == [0, 0, 1, 255, 255]


def test_every_code_survives_the_way_through_floats():
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(to_uint8(codes.float() / 255), codes)


def test_half_types_are_widened_before_they_are_scaled():
    values = torch.linspace(0, 1, 5000).half()
    assert torch.equal(to_uint8(values.clone()), (values.double() * 255).round().to(torch.uint8))


def test_images_of_a_host_are_clipped_and_get_three_channels():
    gray = torch.tensor([-0.5, 0.2, 1.5]).view(1, 1, 3, 1)
    pixels = images_to_uint8(gray)
    assert pixels.shape == (1, 1, 3, 3)
    assert pixels[0, 0, :, 0].tolist() == [0, 51, 255]
    alpha = torch.cat([gray.expand(-1, -1, -1, 3), torch.zeros_like(gray)], dim=-1)
    assert torch.equal(images_to_uint8(alpha), pixels)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_images_that_are_not_finite_are_refused_with_their_place(value):
    images = torch.zeros(CHUNK + 3, 2, 2, 3)
    images[CHUNK + 1, 0, 0, 0] = value
    with pytest.raises(RequestError, match=f"frames {CHUNK} to {CHUNK + 2}"):
        images_to_uint8(images)
    assert images[0].eq(0).all()


def test_images_of_a_host_are_not_changed():
    images = torch.rand(2, 2, 2, 3)
    before = images.clone()
    images_to_uint8(images)
    assert torch.equal(images, before)
