import pytest
import torch

from comfyui_h3.kernels.conv3d import conv3d
from comfyui_h3.kernels.dispatch import backend, tensor_core_problem
from comfyui_h3.kernels.split_half import SplitWeight
from comfyui_h3.kernels.split_rows import pixel_rows, pixel_weight, strided_rows
from comfyui_h3.tests.kernels.conv_inputs import (
    causal_conv,
    channels_last,
    clips,
    downsampling_conv,
    make_conv,
)
from comfyui_h3.tests.tolerances import relative_error

# What two halves lose is 2**-22 of a product, and a sum of float32 products in any order rounds about as much.
SPLIT = 1e-6
# One half of each operand: 2**-11 of either factor; products of random sign cancel most of it.
HALF = 1e-3


# Rows of one block of 128, of several, of fewer; widths off the blocks' 64 and 128; K of several steps.
SHAPES = [(1, 2, 4, 32, 32), (4, 6, 6, 32, 48), (5, 4, 24, 64, 96), (2, 30, 18, 32, 32), (1, 4, 6, 256, 160)]


@pytest.mark.triton
@pytest.mark.parametrize("time_stride", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("planes", "tolerance"), [(2, SPLIT), (1, HALF)])
def test_downsampling_equals_a_strided_convolution_in_float64(time_stride, shape, planes, tolerance, device, generator):
    clip, height, width, num_in, num_out = shape
    x = torch.randn(2, num_in, clip, height, width, device=device, generator=generator)
    weight, bias = make_conv(num_in, num_out, device, generator)
    wanted = downsampling_conv(x.double(), weight.double(), bias.double(), time_stride)
    with backend("triton"):
        rows = strided_rows(channels_last(x), planes)
        out = conv3d(rows, SplitWeight.of(weight, planes), bias, clip=clip, time_stride=time_stride)
    assert relative_error(clips(out, wanted.shape[2]), wanted) <= tolerance


@pytest.mark.triton
@pytest.mark.parametrize(("clip", "height", "width"), [(1, 2, 2), (3, 7, 20)])
def test_the_first_convolution_reads_pixels(clip, height, width, device, generator):
    x = torch.randn(2, 3, clip, height, width, device=device, generator=generator)
    weight, bias = make_conv(3, 32, device, generator)
    with backend("triton"):
        out = conv3d(pixel_rows(x, 2), pixel_weight(weight, 2), bias, clip=clip)
    assert relative_error(clips(out, clip), causal_conv(x.double(), weight.double(), bias.double())) <= SPLIT


@pytest.mark.triton
@pytest.mark.parametrize("unit", [1e-30, 1e-6, 1e4, 1e20])
def test_large_and_tiny_values_neither_overflow_nor_vanish(unit, device, generator):
    x = unit * torch.randn(1, 32, 2, 6, 6, device=device, generator=generator)
    weight, _ = make_conv(32, 48, device, generator)
    weight *= torch.logspace(-6, 4, 48, device=device).view(-1, 1, 1, 1, 1)
    bias = torch.zeros(48, device=device)
    wanted = downsampling_conv(x.double(), weight.double(), None, 1)
    with backend("triton"):
        out = clips(conv3d(strided_rows(channels_last(x), 2), SplitWeight.of(weight, 2), bias, clip=2), 2)
    error = (out.double() - wanted).abs().amax((0, 2, 3, 4)) / wanted.abs().amax((0, 2, 3, 4))
    assert error.max() <= SPLIT


@pytest.mark.triton
def test_nothing_gives_the_bias(device, generator):
    weight, bias = make_conv(32, 32, device, generator)
    with backend("triton"):
        rows = strided_rows(torch.zeros(2, 4, 4, 32, device=device), 2)
        out = conv3d(rows, SplitWeight.of(weight, 2), bias, clip=2)
        none = conv3d(rows, SplitWeight.of(torch.zeros_like(weight), 2), bias, clip=2)
    assert torch.equal(out, bias.expand_as(out))
    assert torch.equal(none, bias.expand_as(out))


@pytest.mark.triton
def test_what_is_not_a_number_shows(device, generator):
    weight, bias = make_conv(32, 32, device, generator)
    x = torch.randn(1, 4, 4, 32, device=device, generator=generator)
    x[0, 0, 0, 3] = float("inf")
    with backend("triton"):
        out = conv3d(strided_rows(x, 2), SplitWeight.of(weight, 2), bias, clip=1)
    assert out[0, 0, 0].isnan().all()


@pytest.mark.triton
def test_no_frame_sees_a_later_one_or_another_clip(device, generator):
    x = torch.randn(6, 4, 6, 32, device=device, generator=generator)
    x[0, 0, 0, 0] = 10  # the largest value, which sets the scale, stays
    changed = x.clone()
    changed[2] = torch.randn(4, 6, 32, device=device, generator=generator)
    weight, bias = make_conv(32, 32, device, generator)
    with backend("triton"):
        out, other = (conv3d(strided_rows(v, 2), SplitWeight.of(weight, 2), bias, clip=3) for v in (x, changed))
    assert torch.equal(out[[0, 1, 3, 4, 5]], other[[0, 1, 3, 4, 5]])
    assert not torch.equal(out[2], other[2])


@pytest.mark.triton
def test_kernel_equals_reference(device, generator):
    x = torch.randn(6, 6, 8, 64, device=device, generator=generator)
    weight, bias = make_conv(64, 96, device, generator)
    outs = []
    for name in ("triton", "torch"):
        with backend(name):
            outs.append(conv3d(strided_rows(x, 2), SplitWeight.of(weight, 2), bias, clip=3, time_stride=2))
    assert relative_error(*outs) <= SPLIT


def test_a_cpu_needs_the_interpreter(device, monkeypatch):
    if device.type == "cuda":
        pytest.skip("is about machines without a CUDA device")
    monkeypatch.setattr("comfyui_h3.kernels.dispatch.INTERPRETED", False)
    assert "cpu" in tensor_core_problem(device)


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("positive", [False, True])
def test_long_sums_are_rounded_and_not_cut_off(positive, device, generator):
    """Operands of one sign would show what tensor cores cut off, 2**-24 for each 16 channels and always downwards."""
    x = torch.randn(1, 16, 16, 512, device=device, generator=generator)
    weight, bias = make_conv(512, 128, device, generator)
    if positive:
        x, weight = x.abs(), weight.abs()
    wanted = downsampling_conv(clips(x, 1).double(), weight.double(), bias.double(), 1)
    with backend("triton"):
        out = clips(conv3d(strided_rows(x, 2), SplitWeight.of(weight, 2), bias, clip=1), 1)
    assert relative_error(out, wanted) <= SPLIT


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("planes", [1, 2])
def test_equal_inputs_give_equal_bits_at_full_size(planes, device, generator):
    x = torch.randn(3, 256, 256, 128, device=device, generator=generator)
    weight, bias = make_conv(128, 128, device, generator)
    with backend("triton"):
        rows, split = strided_rows(x, planes), SplitWeight.of(weight, planes)
        first, second = (conv3d(rows, split, bias, clip=3) for _ in range(2))
    assert torch.equal(first, second)
