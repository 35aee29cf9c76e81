import pytest
import torch

from comfyui_h3.kernels.conv3d_pairs import conv3d_pairs, pair_weight
from comfyui_h3.kernels.dispatch import backend
from comfyui_h3.kernels.group_norm_silu import group_norm_silu
from comfyui_h3.kernels.split_half import join_ref
from comfyui_h3.tests.kernels.conv_inputs import causal_conv, channels_last, clips, make_conv, normed
from comfyui_h3.tests.tolerances import relative_error

# See test_conv3d.py; the sums of inputs and of weights let the error grow by a third.
SPLIT = 1.5e-6
HALF = 1.5e-3

# Even and odd widths; pairs of several rows in one block of 128, rows of several blocks, widths off the blocks.
SHAPES = [
    (1, 1, 2, 2, 32, 48),
    (2, 3, 5, 7, 64, 96),
    (1, 2, 3, 131, 32, 32),
    (1, 1, 4, 6, 256, 160),
    (1, 1, 5, 3, 32, 32),
]


def pair_rows(x, planes):
    ones = torch.ones(x.shape[1], device=x.device)
    return group_norm_silu(channels_last(x), ones, torch.zeros_like(ones), 32, 1e-6, planes)


@pytest.mark.triton
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("planes", "tolerance"), [(2, SPLIT), (1, HALF)])
def test_equals_the_convolution_in_float64(shape, planes, tolerance, device, generator):
    batch, clip, height, width, num_in, num_out = shape
    x = torch.randn(batch, num_in, clip, height, width, device=device, generator=generator)
    weight, bias = make_conv(num_in, num_out, device, generator)
    wanted = causal_conv(normed(x), weight.double(), bias.double())
    with backend("triton"):
        out = conv3d_pairs(pair_rows(x, planes), pair_weight(weight, planes), bias, clip=clip)
    assert out.shape == (batch * clip, height, width, num_out)
    assert relative_error(clips(out, clip), wanted) <= tolerance


@pytest.mark.triton
@pytest.mark.parametrize("shape", [(1, 2, 5, 6, 32, 48), (1, 1, 3, 5, 64, 32)])
def test_kernels_equal_their_references(shape, device, generator):
    batch, clip, height, width, num_in, num_out = shape
    x = torch.randn(batch, num_in, clip, height, width, device=device, generator=generator)
    weight, bias = make_conv(num_in, num_out, device, generator)
    outs, rows = [], []
    for name in ("triton", "torch"):
        with backend(name):
            rows.append(pair_rows(x, 2))
            outs.append(conv3d_pairs(rows[-1], pair_weight(weight, 2), bias, clip=clip))
    sums = [join_ref(r.rows, r.bound).unflatten(0, (-1, 4, height + 2, r.pairs)) for r in rows]
    assert rows[0].rows.shape == rows[1].rows.shape
    assert relative_error(sums[0][:, :3], sums[1][:, :3]) <= SPLIT  # the fourth of an odd width belongs to no pixel
    assert relative_error(outs[0], outs[1]) <= SPLIT


@pytest.mark.triton
@pytest.mark.parametrize("unit", [1e-6, 1e4])
def test_large_and_tiny_weights_neither_overflow_nor_vanish(unit, device, generator):
    x = torch.randn(1, 32, 2, 4, 6, device=device, generator=generator)
    weight, _ = make_conv(32, 48, device, generator)
    weight *= unit * torch.logspace(-6, 4, 48, device=device).view(-1, 1, 1, 1, 1)
    ones, bias = torch.ones(32, device=device), torch.zeros(48, device=device)
    frames = channels_last(x)
    wanted = causal_conv(unit * normed(x), weight.double(), None)
    with backend("triton"):
        rows = group_norm_silu(frames, ones, torch.zeros_like(ones), 32, 1e-6, 2)
        out = clips(conv3d_pairs(rows, pair_weight(weight, 2), bias, clip=2), 2) * unit
    error = (out.double() - wanted).abs().amax((0, 2, 3, 4)) / wanted.abs().amax((0, 2, 3, 4))
    assert error.max() <= SPLIT


@pytest.mark.triton
def test_a_residual_is_added_and_its_memory_taken(device, generator):
    x = torch.randn(1, 64, 2, 5, 7, device=device, generator=generator)
    weight, bias = make_conv(64, 48, device, generator)
    residual = torch.randn(2, 5, 7, 48, device=device, generator=generator)
    with backend("triton"):
        rows = pair_rows(x, 2)
        plain = conv3d_pairs(rows, pair_weight(weight, 2), bias, clip=2)
        memory = residual.clone()
        out = conv3d_pairs(rows, pair_weight(weight, 2), bias, clip=2, residual=memory)
    assert out.data_ptr() == memory.data_ptr()
    torch.testing.assert_close(out, plain + residual, rtol=0, atol=1e-6)


@pytest.mark.triton
def test_no_frame_sees_a_later_one_or_another_clip(device, generator):
    x = torch.randn(2, 32, 3, 5, 6, device=device, generator=generator)
    changed = x.clone()
    changed[0, :, 2] = 7 * torch.randn(32, 5, 6, device=device, generator=generator)
    weight, bias = make_conv(32, 32, device, generator)
    with backend("triton"):
        out, other = (conv3d_pairs(pair_rows(v, 2), pair_weight(weight, 2), bias, clip=3) for v in (x, changed))
        alone = conv3d_pairs(pair_rows(x[1:], 2), pair_weight(weight, 2), bias, clip=3)
    assert torch.equal(out[[0, 1, 3, 4, 5]], other[[0, 1, 3, 4, 5]])
    assert not torch.equal(out[2], other[2])
    assert torch.equal(out[3:], alone)


@pytest.mark.triton
def test_what_is_not_a_number_shows(device, generator):
    x = torch.randn(1, 32, 1, 4, 4, device=device, generator=generator)
    x[0, 3, 0, 0, 0] = float("nan")
    weight, bias = make_conv(32, 32, device, generator)
    with backend("triton"):
        out = conv3d_pairs(pair_rows(x, 2), pair_weight(weight, 2), bias, clip=1)
    assert out.isnan().all()  # the norm spreads it over the channel of the frame


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("positive", [False, True])
def test_long_sums_are_rounded_and_not_cut_off(positive, device, generator):
    x = torch.randn(1, 512, 1, 16, 16, device=device, generator=generator)
    weight, bias = make_conv(512, 128, device, generator)
    if positive:
        weight = weight.abs()
    wanted = causal_conv(normed(x), weight.double(), bias.double())
    with backend("triton"):
        out = clips(conv3d_pairs(pair_rows(x, 2), pair_weight(weight, 2), bias, clip=1), 1)
    assert relative_error(out, wanted) <= SPLIT


@pytest.mark.gpu
@pytest.mark.triton
def test_equal_inputs_give_equal_bits_at_full_size(device, generator):
    x = torch.randn(1, 128, 3, 256, 256, device=device, generator=generator)
    weight, bias = make_conv(128, 128, device, generator)
    with backend("triton"):
        rows, split = pair_rows(x, 2), pair_weight(weight, 2)
        first, second = (conv3d_pairs(rows, split, bias, clip=3) for _ in range(2))
    assert torch.equal(first, second)
