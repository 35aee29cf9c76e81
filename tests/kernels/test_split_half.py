import pytest
import torch

from comfyui_h3.kernels.split_half import SplitWeight, join_ref, scale_exponent_ref, split_ref


def spread(generator, device):
    """Values of every size from 2**-30 to 1."""
    size = torch.ldexp(torch.ones(4096, device=device), -(torch.arange(4096, device=device) % 31))
    return size * (1 + torch.rand(4096, device=device, generator=generator)) / 2


@pytest.mark.parametrize("unit", [1e-20, 1e-6, 1.0, 1e4, 3e30])
def test_two_halves_hold_22_bits_of_the_larger_values_and_a_fixed_step_of_the_others(unit, device, generator):
    x = spread(generator, device) * unit
    bound = x.abs().amax()
    error = (join_ref(split_ref(x, bound, 2), bound).double() - x.double()).abs()
    assert (error <= (2.0**-23 * x.double()).clamp(min=2.0**-39 * bound.double())).all()


def test_one_half_is_float16(device, generator):
    x = torch.randn(1000, device=device, generator=generator)
    bound = x.abs().amax()
    assert split_ref(x, bound, 1).shape == (1, 1000)
    assert (join_ref(split_ref(x, bound, 1), bound) - x).abs().max() <= 2.0**-11 * bound


@pytest.mark.parametrize("bound", [0.0, 1e-40, 1e-38, 1.0, 32768.0, 65504.0, 3.4e38])
def test_nothing_up_to_the_bound_overflows(bound):
    x = torch.tensor([bound, -bound, bound / 3])
    halves = split_ref(x, torch.tensor(bound), 2)
    assert halves.isfinite().all()
    assert halves.abs().max() <= 2.0**15


def test_the_scale_is_a_power_of_two_that_uses_the_range():
    bounds = torch.tensor([1e-6, 0.5, 1.0, 1.5, 1e4])
    scaled = torch.ldexp(bounds, scale_exponent_ref(bounds))
    assert ((scaled >= 2.0**14) & (scaled <= 2.0**15)).all()


def test_rows_of_a_weight_are_taps_then_outputs(generator):
    weight = torch.randn(5, 8, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    split = SplitWeight.of(weight, 2)
    assert split.rows.shape == (2, 27 * 5, 8)
    joined = join_ref(split.rows, split.bound.repeat(27)[:, None])
    torch.testing.assert_close(joined[(1 * 9 + 2 * 3 + 0) * 5 + 4], weight[4, :, 1, 2, 0], rtol=2**-20, atol=0)


def test_every_output_of_a_weight_has_a_scale_of_its_own():
    weight = torch.randn(3, 8, 3, 3, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [1e-6, 1.0, 1e4]
    ).view(3, 1, 1, 1, 1)
    split = SplitWeight.of(weight, 2)
    joined = join_ref(split.rows, split.bound.repeat(27)[:, None]).unflatten(0, (27, 3))
    wanted = weight.flatten(2).permute(2, 0, 1)
    assert ((joined - wanted).abs().amax((0, 2)) <= 2.0**-23 * wanted.abs().amax((0, 2))).all()
