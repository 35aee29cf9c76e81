import pytest
import torch

from comfyui_h3.kernels.dispatch import backend
from comfyui_h3.kernels.norm_modulate import norm_modulate, norm_modulate_ref
from comfyui_h3.tests.tolerances import NORM_DIFFERENT_SHARE, NORM_THEN_PRODUCTS_ULPS, NORM_ULPS, ulp_of, ulps_apart

EPS = 1e-5


def make_inputs(num_rows, dim, num_mod, device, generator):
    x, weight, index = make_rows(num_rows, dim, num_mod, device, generator)
    scale, shift = torch.randn(2, num_mod, dim, device=device, generator=generator).bfloat16()
    return x, weight, scale, shift, index


def make_rows(num_rows, dim, num_mod, device, generator):
    x = (2 * torch.randn(num_rows, dim, device=device, generator=generator)).bfloat16()
    weight = (1 + 0.2 * torch.randn(dim, device=device, generator=generator)).bfloat16()
    index = torch.randint(num_mod, (num_rows,), device=device, dtype=torch.int32, generator=generator)
    return x, weight, index


def integers(x):
    """Small integers: their squares add up exactly, in every order."""
    return (4 * x).round().clamp(-16, 16)


def check_close(out, x, weight, scale, shift, index):
    expected = norm_modulate_ref(x, weight, scale, shift, index, EPS)
    h = torch.nn.functional.rms_norm(x, weight.shape, weight, EPS)
    shift = shift.index_select(0, index)
    product = h * (1 + scale).index_select(0, index)
    step = ulp_of(torch.stack((product.abs(), shift.abs(), expected.abs())).amax(0))
    assert out.isfinite().all()
    assert (out != expected).float().mean() <= NORM_DIFFERENT_SHARE
    assert ((out.float() - expected.float()).abs() <= NORM_THEN_PRODUCTS_ULPS * step).all()


SHAPES = [(1, 1, 1), (3, 2049, 2), (129, 96, 6), (17, 5376, 6)]


@pytest.mark.triton
@pytest.mark.parametrize(("num_rows", "dim", "num_mod"), [(0, 64, 3), *SHAPES])
def test_is_bit_identical_where_the_squares_add_up_exactly(num_rows, dim, num_mod, device, generator):
    x, *rest = make_inputs(num_rows, dim, num_mod, device, generator)
    x = integers(x)
    with backend("triton"):
        out = norm_modulate(x, *rest, EPS)
    assert out.shape == (num_rows, dim)
    assert torch.equal(out, norm_modulate_ref(x, *rest, EPS))


@pytest.mark.triton
@pytest.mark.parametrize(("num_rows", "dim", "num_mod"), SHAPES)
def test_norm_alone_is_within_one_step_of_reference(num_rows, dim, num_mod, device, generator):
    x, weight, index = make_rows(num_rows, dim, num_mod, device, generator)
    zero = torch.zeros(num_mod, dim, device=device, dtype=torch.bfloat16)
    with backend("triton"):
        out = norm_modulate(x, weight, zero, zero, index, EPS)
    apart = ulps_apart(out, torch.nn.functional.rms_norm(x, weight.shape, weight, EPS))
    assert apart.max() <= NORM_ULPS
    assert (apart > 0).float().mean() <= NORM_DIFFERENT_SHARE


@pytest.mark.triton
@pytest.mark.parametrize(("num_rows", "dim", "num_mod"), SHAPES)
def test_is_close_to_reference(num_rows, dim, num_mod, device, generator):
    inputs = make_inputs(num_rows, dim, num_mod, device, generator)
    with backend("triton"):
        out = norm_modulate(*inputs, EPS)
    check_close(out, *inputs)


@pytest.mark.triton
def test_reads_strided_rows_in_place(device, generator):
    x, weight, index = make_rows(37, 300, 6, device, generator)
    x = integers(x)[:, 40:240]
    weight = weight[:200]
    table = torch.randn(6, 6 * 200, device=device, generator=generator).bfloat16()
    flat, split = table.chunk(6, dim=-1), table.view(6, 6, 200).unbind(1)
    for shift, scale in ((flat[0], flat[1]), (split[3], split[4])):
        with backend("triton"):
            out = norm_modulate(x, weight, scale, shift, index, EPS)
        expected = norm_modulate_ref(x.contiguous(), weight, scale.contiguous(), shift.contiguous(), index, EPS)
        assert torch.equal(out, expected)


@pytest.mark.triton
def test_a_row_does_not_depend_on_its_neighbours(device, generator):
    x, weight, scale, shift, index = make_inputs(8, 96, 3, device, generator)
    with backend("triton"):
        out = norm_modulate(x, weight, scale, shift, index, EPS)
        alone = norm_modulate(x[5:6], weight, scale, shift, index[5:6], EPS)
    assert torch.equal(out[5:6], alone)


def test_fp32_is_the_formula(device, generator):
    x, weight, scale, shift, index = (
        t.double() if t.is_floating_point() else t.long() for t in make_inputs(9, 40, 3, device, generator)
    )
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight * (1 + scale[index]) + shift[index]
    out = norm_modulate(x.float(), weight.float(), scale.float(), shift.float(), index, EPS)
    torch.testing.assert_close(out, expected.float(), rtol=1e-6, atol=1e-6)  # fp32 has 24 significant bits


@pytest.mark.gpu
@pytest.mark.triton
def test_addresses_pass_2_to_the_31(device, generator):
    num_rows, dim = 399_872, 5376  # 2.15e9 elements, 4.3 GB
    last = slice(num_rows - 64, num_rows)
    x = torch.zeros(num_rows, dim, device=device, dtype=torch.bfloat16)
    x[last], weight, scale, shift, _ = make_inputs(64, dim, 6, device, generator)
    index = torch.randint(6, (num_rows,), device=device, dtype=torch.int32, generator=generator)
    with backend("triton"):
        out = norm_modulate(x, weight, scale, shift, index, EPS)
    check_close(out[last], x[last], weight, scale, shift, index[last])
