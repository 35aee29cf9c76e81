import math

import pytest
import torch

from comfyui_h3.kernels.dispatch import BackendError, backend
from comfyui_h3.kernels.snake_beta import RUN, snake_beta, snake_beta_ref

EPS = 2.0**-24  # of one rounding to float32
ROUNDINGS = 12  # between an input and a term: taps, sums of six and twelve, frequency, phase, sine, amplitude


def make_inputs(channels, length, device, generator, *, num_items=2, channels_last=False):
    x = torch.randn(num_items, channels, length, device=device, generator=generator)
    alpha, beta = torch.randn(2, channels, device=device, generator=generator).unbind()
    up, down = (
        0.5 * torch.randn(2, 1, 1, 12, device=device, generator=generator)
    ).unbind()  # no symmetry hides an order
    return x.mT.contiguous().mT if channels_last else x, alpha, beta, up, down


def run(*inputs):
    with backend("triton"):
        return snake_beta(*inputs)


def check_close(out, x, alpha, beta, up, down):
    """Within what the roundings of the way can make of the largest values on it, against float64."""
    expected = snake_beta_ref(*(t.double() for t in (x, alpha, beta, up, down)))
    largest = 2 * x.abs().max().item() * up.abs().sum().item()  # of u
    frequency, amplitude = alpha.double().exp(), 1 / (beta.double().exp() + 1e-9)
    slope = 1 + (amplitude * frequency).max().item()  # of v over u
    bound = ROUNDINGS * EPS * (largest * slope + amplitude.max().item()) * down.abs().sum().item()
    assert out.shape == x.shape
    assert (out.double() - expected).abs().max() <= bound


BORDERS = [1, 2, 3, RUN - 1, RUN, RUN + 1, 2 * RUN + 3]


@pytest.mark.triton
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("length", BORDERS)
def test_is_the_formula_in_float64_at_every_border(length, channels_last, device, generator):
    inputs = make_inputs(3, length, device, generator, channels_last=channels_last)
    check_close(run(*inputs), *inputs)


@pytest.mark.triton
@pytest.mark.parametrize(("channels", "length"), [(1, 700), (8, 333), (130, 5)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_is_the_formula_across_tiles_of_channels_and_time(channels, length, channels_last, device, generator):
    inputs = make_inputs(channels, length, device, generator, channels_last=channels_last)
    check_close(run(*inputs), *inputs)


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize(("channels", "length"), [(512, 2025), (64, 40_500), (8, 324_000)])
def test_is_the_formula_at_the_sizes_of_10_s(channels, length, device, generator):
    inputs = make_inputs(channels, length, device, generator, channels_last=True)
    check_close(run(*inputs), *inputs)


@pytest.mark.triton
def test_equal_values_get_equal_bits_whatever_the_strides_and_neighbours(device, generator):
    x, *rest = make_inputs(4, 50, device, generator)
    out = run(x, *rest)
    assert out.mT.is_contiguous()
    assert torch.equal(run(x.mT.contiguous().mT, *rest), out)
    assert torch.equal(run(x[1:].contiguous(), *rest), out[1:])
    alpha, beta, up, down = rest
    assert torch.equal(run(x[:, 2:3].contiguous(), alpha[2:3], beta[2:3], up, down), out[:, 2:3])


def passing(device):
    """Taps that make u[2t] = u[2t + 1] = x[t] and y[t] = v[2t], exactly."""
    up, down = torch.zeros(2, 1, 1, 12, device=device).unbind()
    up[..., 5:7] = 0.5
    down[..., 5] = 1
    return up, down


@pytest.mark.triton
@pytest.mark.parametrize("largest", [1.0, 1e2, 1e4, 1e6])
def test_the_sine_of_large_arguments_is_that_of_float64(largest, device, generator):
    x = largest * (2 * torch.rand(1, 1, 4096, device=device, generator=generator) - 1)
    alpha, beta = torch.zeros(1, device=device), torch.full((1,), -60.0, device=device)  # e**-60 + 1e-9: 1e9 times
    out = run(x, alpha, beta, *passing(device))
    expected = x.double() + 1e9 * x.double().sin().square()
    assert (out.double() - expected).abs().max() <= 4e-7 * 1e9


@pytest.mark.triton
def test_the_frequency_is_exact_to_its_last_bits(device):
    alpha = torch.linspace(-12, 7, 512, device=device)
    x = torch.ones(1, 512, 1, device=device)
    out = run(x, alpha, torch.zeros_like(alpha), *passing(device))
    frequency = alpha.double().exp()
    expected = 1 + frequency.sin().square() / (1 + 1e-9)
    assert ((out[0, :, 0].double() - expected).abs() <= 4 * EPS * (1 + frequency)).all()


@pytest.mark.triton
@pytest.mark.parametrize("beta", [-100.0, 0.0, 100.0, math.inf])
def test_extreme_amplitudes_are_those_of_the_formula(beta, device):
    x = torch.full((1, 1, 4), 0.5, device=device)
    inputs = (x, torch.zeros(1, device=device), torch.full((1,), beta, device=device), *passing(device))
    torch.testing.assert_close(run(*inputs), snake_beta_ref(*inputs), rtol=1e-6, atol=0)


@pytest.mark.triton
@pytest.mark.parametrize("value", [3e7, -1e12, 3e38])
def test_the_sine_of_what_has_no_fraction_counts_as_zero(value, device):
    x = torch.full((1, 1, 4), value, device=device)
    zero = torch.zeros(1, device=device)
    assert torch.equal(run(x, zero, zero, *passing(device)), x)


@pytest.mark.triton
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_stay_so(value, device, generator):
    x, *rest = make_inputs(2, 60, device, generator)
    x[1, 1, 30] = value
    out = run(x, *rest)
    assert not out[1, 1, 25:36].isfinite().any()
    assert out[0].isfinite().all()
    assert out[1, 0].isfinite().all()


@pytest.mark.gpu
@pytest.mark.triton
def test_addresses_pass_2_to_the_31(device, generator):
    length = 2**30  # three items of 4.3 GB
    x = torch.zeros(3, 1, length, device=device)
    ends = torch.randn(1, 1, 64, device=device, generator=generator)
    x[2, :, -64:] = ends
    zero = torch.zeros(1, device=device)
    taps = torch.full((1, 1, 12), 0.08, device=device)
    out = run(x, zero, zero, taps, taps)
    expected = run(torch.cat([torch.zeros(1, 1, 64, device=device), ends], -1), zero, zero, taps, taps)
    assert torch.equal(out[2, :, -64:], expected[0, :, -64:])


@pytest.mark.triton
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x, *rest: (x.double(), *rest), "x is float64, not float32"),
        (lambda x, alpha, *rest: (x, alpha.half(), *rest), "alpha is float16, not float32"),
        (lambda x, *rest: (x.clone().requires_grad_(), *rest), "x requires a gradient"),
    ],
)
def test_refuses_what_the_kernel_cannot_read(change, reason, device, generator):
    inputs = change(*make_inputs(2, 8, device, generator))
    with backend("triton"), pytest.raises(BackendError, match=reason):
        snake_beta(*inputs)
