"""Costs against the tables that the lengths and sizes of the release give: rows of 5 to 15 s, work of a forward."""

import pytest

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.estimate import RELEASE, Estimate, estimate, forward_flops


@pytest.mark.parametrize(
    ("size", "num_frames", "video", "audio"),
    [
        ((1344, 768), 124, 37_296, 414),
        ((1344, 768), 192, 57_456, 640),
        ((1344, 768), 243, 72_576, 810),
        ((1344, 768), 362, 107_856, 1206),
        ((768, 448), 124, 12_432, 414),
        ((768, 448), 192, 19_152, 640),
        ((768, 448), 243, 24_192, 810),
        ((768, 448), 362, 35_952, 1206),
    ],
)
def test_rows_are_those_of_the_table(size, num_frames, video, audio):
    cost = estimate(*size, num_frames)
    assert (cost.num_video_rows, cost.num_audio_rows, cost.num_rows) == (video, audio, video + audio)


@pytest.mark.parametrize(
    ("num_rows", "linear", "attention", "total"),
    [
        (13_383, 0.516, 0.257, 0.772),
        (25_539, 0.984, 0.935, 1.919),
        (37_776, 1.456, 2.046, 3.501),
        (58_758, 2.264, 4.950, 7.214),
        (73_923, 2.849, 7.834, 10.683),
        (109_599, 4.223, 17.220, 21.444),
    ],
)
def test_arithmetic_is_that_of_the_table(num_rows, linear, attention, total):
    assert forward_flops(num_rows) / 1e15 == pytest.approx(total, abs=6e-4)
    assert 38.535e9 * num_rows / 1e15 == pytest.approx(linear, abs=6e-4)
    assert 1_433_600 * num_rows**2 / 1e15 == pytest.approx(attention, abs=6e-4)


def test_cost_of_a_row_and_of_a_pair_of_rows():
    one, two = forward_flops(1), forward_flops(2)
    assert two - 2 * one == 2 * 1_433_600
    assert one - 1_433_600 == 2 * 50 * 385_351_680


def test_activations_hold_the_widest_layer_and_the_stream():
    """Residual 10,752 bytes a row, qkv 43,008: three times the first, twice the second."""
    cost = Estimate(num_video_rows=73_113, num_audio_rows=810)
    assert cost.activation_bytes == 73_923 * (3 * 10_752 + 2 * 43_008)
    assert 73_923 * 2 * RELEASE.hidden_size / 2**30 == pytest.approx(0.740, abs=6e-4)
    assert 73_923 * 6 * RELEASE.inner_size / 2**30 == pytest.approx(2.961, abs=6e-4)


def test_impossible_size_has_no_cost():
    with pytest.raises(RequestError, match="use 704 or 736"):
        estimate(1344, 720, 124)
