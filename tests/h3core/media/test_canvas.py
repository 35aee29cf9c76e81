"""Canvases of a ratio: the table of the release, and diffusers' rule on many sizes."""

import random

import pytest

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media.canvas import canvas_for_ratio, check_canvas


@pytest.mark.parametrize(
    ("ratio", "canvas"),
    [
        ((21, 9), (1536, 672)),
        ((16, 9), (1344, 768)),
        ((7, 4), (1344, 768)),
        ((4, 3), (1024, 768)),
        ((1, 1), (768, 768)),
        ((3, 4), (768, 1024)),
        ((9, 16), (768, 1344)),
        ((2, 1), (1440, 704)),
        ((4, 1), (2016, 512)),
        ((1, 4), (512, 2016)),
    ],
)
def test_canvas_of_a_ratio_is_that_of_the_release(ratio, canvas):
    assert canvas_for_ratio(*ratio) == canvas
    check_canvas(*canvas)


@pytest.mark.parametrize(("short_edge", "canvas"), [(512, (896, 512)), (544, (960, 544)), (1440, (1344, 768))])
def test_other_short_edges_keep_the_area_cap(short_edge, canvas):
    assert canvas_for_ratio(16, 9, short_edge) == canvas


@pytest.mark.parametrize("size", [(401, 100), (100, 401), (0, 10), (10, 0), (-4, 4)])
def test_ratio_outside_4_to_1_is_refused(size):
    with pytest.raises(RequestError, match=rf"{size[0]}x{size[1]}"):
        canvas_for_ratio(*size)


@pytest.mark.oracle
def test_canvas_equals_diffusers_on_many_sizes():
    from diffusers.modular_pipelines.minimax_h3.before_encoder import resolve_canvas_size

    sizes = random.Random(0)
    for _ in range(5000):
        width, height = sizes.randint(1, 4000), sizes.randint(1, 4000)
        if max(width, height) <= 4 * min(width, height):
            theirs = resolve_canvas_size(width, height, 32, 768, 768 * 1344)
            assert canvas_for_ratio(width, height) == (theirs[1], theirs[0]), (width, height)
