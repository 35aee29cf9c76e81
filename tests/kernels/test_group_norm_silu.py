import pytest
import torch
from torch.nn import functional as F

from comfyui_h3.kernels.conv3d_pairs import sums_of_inputs
from comfyui_h3.kernels.dispatch import backend
from comfyui_h3.kernels.group_norm_silu import frame_statistics, group_norm_silu
from comfyui_h3.kernels.split_half import join_ref

EPS = 1e-6
GROUPS = 32
SHAPES = [(1, 2, 2, 32), (3, 5, 7, 64), (2, 9, 30, 128), (2, 3, 2, 1024)]

# Two halves hold 22 bits, and the mean and the variance are sums of float32 in another order: a few units of 2**-22 of
# the largest value.
TOLERANCE = 1e-6


def make_inputs(num_frames, height, width, channels, device, generator):
    x = 2 * torch.randn(num_frames, height, width, channels, device=device, generator=generator) + 0.5
    weight = 0.5 + torch.rand(channels, device=device, generator=generator)
    return x, weight, torch.randn(channels, device=device, generator=generator)


def sums_in_float64(x, weight, bias):
    y = F.silu(F.group_norm(x.double().movedim(-1, 1), GROUPS, weight.double(), bias.double(), EPS))
    padded = F.pad(F.pad(y, (1, 1, 1, 1), mode="reflect"), (0, x.shape[2] % 2)).movedim(1, -1)
    return sums_of_inputs(padded)  # (F, 4, H + 2, P, C)


def values(rows):
    """The sums; of an odd width the last of the fourth belong to no pixel."""
    sums = join_ref(rows.rows, rows.bound).unflatten(0, (-1, 4, rows.height + 2, rows.pairs))
    if rows.width % 2:
        sums[:, 3, :, -1] = 0
    return sums


def errors(rows, wanted):
    if rows.width % 2:
        wanted[:, 3, :, -1] = 0
    return (values(rows).double() - wanted).abs().max() / wanted.abs().max()


def test_sums_are_those_of_the_four_inputs_of_a_pair():
    padded = torch.arange(2 * 3 * 6 * 1).view(2, 3, 6, 1).square().float()
    sums = sums_of_inputs(padded)
    d0, d1, d2, d3 = padded[1, 2, 2:6, 0]
    assert torch.equal(sums[1, :, 2, 1, 0], torch.stack([d0 - d2, d1 + d2, d2 - d1, d1 - d3]))


@pytest.mark.triton
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_group_norm_and_silu_with_a_mirrored_border(shape, device, generator):
    x, weight, bias = make_inputs(*shape, device, generator)
    with backend("triton"):
        rows = group_norm_silu(x, weight, bias, GROUPS, EPS, 2)
    assert (rows.height, rows.width, len(rows.rows)) == (shape[1], shape[2], 2)
    assert errors(rows, sums_in_float64(x, weight, bias)) <= TOLERANCE


@pytest.mark.triton
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_and_reference_have_one_layout(shape, device, generator):
    inputs = make_inputs(*shape, device, generator)
    with backend("triton"):
        rows = group_norm_silu(*inputs, GROUPS, EPS, 2)
    with backend("torch"):
        wanted = group_norm_silu(*inputs, GROUPS, EPS, 2)
    assert rows.rows.shape == wanted.rows.shape
    assert torch.equal(rows.bound, wanted.bound)
    assert errors(rows, values(wanted).double()) <= TOLERANCE


@pytest.mark.triton
def test_one_plane_is_the_high_half(device, generator):
    inputs = make_inputs(2, 5, 6, 64, device, generator)
    with backend("triton"):
        both, high = (group_norm_silu(*inputs, GROUPS, EPS, planes) for planes in (2, 1))
    assert torch.equal(high.rows[0], both.rows[0])


@pytest.mark.triton
def test_a_frame_does_not_depend_on_its_neighbours(device, generator):
    x, weight, bias = make_inputs(3, 5, 7, 64, device, generator)
    with backend("triton"):
        rows = group_norm_silu(x, weight, bias, GROUPS, EPS, 2).rows.unflatten(1, (3, -1))
        alone = group_norm_silu(x[1:2].contiguous(), weight, bias, GROUPS, EPS, 2).rows
    assert torch.equal(rows[:, 1], alone)


@pytest.mark.triton
@pytest.mark.parametrize(("offset", "size"), [(0.0, 1e-6), (0.0, 1e4), (1e3, 1.0), (1e-4, 1e-6)])
def test_variance_is_sound_far_from_zero(offset, size, device, generator):
    x = offset + size * torch.randn(2, 16, 20, 64, device=device, generator=generator)
    with backend("triton"):
        mean, rstd = frame_statistics(x, GROUPS, 1e-30)
    grouped = x.double().flatten(1, 2).unflatten(-1, (GROUPS, -1)).movedim(2, 1).flatten(2)
    step = 2.0**-24 * abs(offset) / size  # of a mean in float32, in standard deviations; E[x^2] - E[x]^2 has its square
    torch.testing.assert_close(mean.double(), grouped.mean(-1), rtol=1e-6, atol=1e-6 * size)
    torch.testing.assert_close(rstd.double(), grouped.var(-1, correction=0).rsqrt(), rtol=2e-6 + step, atol=0)


@pytest.mark.triton
def test_the_largest_value_that_a_norm_can_give_does_not_overflow(device):
    x = torch.zeros(1, 64, 64, 32, device=device)
    x[0, 3, 5] = 1e4  # one pixel of 4096: 64 standard deviations away
    with backend("triton"):
        rows = group_norm_silu(x, torch.full((32,), 50.0, device=device), torch.ones(32, device=device), 32, EPS, 2)
    wanted = sums_in_float64(x, torch.full((32,), 50.0, device=device), torch.ones(32, device=device))
    assert wanted.max() > 3000
    assert rows.rows.isfinite().all()
    assert errors(rows, wanted) <= TOLERANCE


@pytest.mark.triton
def test_what_is_not_a_number_stays_so(device, generator):
    x, weight, bias = make_inputs(2, 4, 4, 32, device, generator)
    x[1, 2, 2, 7] = float("nan")
    with backend("triton"):
        out = values(group_norm_silu(x, weight, bias, GROUPS, EPS, 2))
    assert out[0].isfinite().all()
    assert out[1, ..., 7].isnan().all()


@pytest.mark.gpu
@pytest.mark.triton
def test_equal_inputs_give_equal_bits_at_full_size(device, generator):
    inputs = make_inputs(3, 256, 256, 128, device, generator)
    with backend("triton"):
        first, second = (group_norm_silu(*inputs, GROUPS, EPS, 2).rows for _ in range(2))
    assert torch.equal(first, second)
