"""H3 Canvas: sizes, lengths and what they cost."""

import pytest
import torch

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.nodes.canvas import H3Canvas


def image(height, width):
    return torch.full((1, height, width, 3), 0.5)


@pytest.mark.parametrize(
    ("aspect", "size"),
    [
        ("16:9", (1344, 768)),
        ("21:9", (1536, 672)),
        ("4:3", (1024, 768)),
        ("1:1", (768, 768)),
        ("3:4", (768, 1024)),
        ("9:16", (768, 1344)),
    ],
)
def test_canvas_has_the_sizes_of_the_release(aspect, size, shown):
    width, height, num_frames, summary = H3Canvas.execute(aspect, 768, 5.0).result
    assert (width, height, num_frames) == (*size, 124)
    assert shown == [summary]


def test_canvas_follows_an_image(shown):
    assert H3Canvas.execute("auto", 768, 5.0, image(384, 672)).result[:2] == (1344, 768)
    assert H3Canvas.execute("auto", 768, 5.0, image(384, 672)[0]).result[:2] == (1344, 768)
    assert H3Canvas.execute("1:1", 768, 5.0, image(384, 672)).result[:2] == (768, 768)


def test_pixels_of_an_image_are_not_read(shown):
    """A batch of frames is many gigabytes, and its shape is all that matters."""
    frames = torch.empty(1, 1, 1, 1, device="meta").expand(10**6, 384, 672, 3)
    assert H3Canvas.execute("auto", 768, 5.0, frames).result[:2] == (1344, 768)


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        ("abc", "IMAGE"),
        ({}, "IMAGE"),
        (torch.zeros(384, 672), "image has the shape (384, 672); it must be (batch, height, width, channels)"),
        (torch.zeros(1, 384, 672), "image has the shape (1, 384, 672)"),
        (torch.zeros(0, 384, 672, 3), "image has the shape (0, 384, 672, 3)"),
    ],
)
def test_what_is_no_image_is_refused(value, remedy):
    with pytest.raises(RequestError) as info:
        H3Canvas.execute("auto", 768, 5.0, value)
    assert remedy in str(info.value)


def test_canvas_without_its_image_is_refused():
    with pytest.raises(RequestError, match="image, which is not connected"):
        H3Canvas.execute("auto", 768, 5.0)
    with pytest.raises(RequestError, match="longer than 4:1"):
        H3Canvas.execute("auto", 768, 5.0, image(40, 4000))


def test_canvas_says_what_it_costs(shown):
    summary = H3Canvas.execute("16:9", 768, 10.0).result[3]
    assert summary.splitlines() == [
        "1344x768, 243 frames (10.12 s)",
        "73,386 rows (72,576 video, 810 audio) and the prompt's",
        "10.5 PFLOP a forward, 517 for 49 forwards",
        "activations 8.1 GiB, weights 37.4 GiB after 48.0 GiB of the text encoder; 100 GiB where all of it stays on "
        "the GPU (released model, bf16)",
    ]


def test_canvas_notices_an_unusual_length(shown):
    assert "outside the trained range" in H3Canvas.execute("16:9", 768, 3.0).result[3]
