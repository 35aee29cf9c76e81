import pytest
import torch

from comfyui_h3.kernels.dispatch import backend
from comfyui_h3.kernels.norm_modulate_fp8 import norm_modulate_fp8, norm_modulate_fp8_ref
from comfyui_h3.tests.tolerances import NORM_DIFFERENT_SHARE

EPS = 1e-5
SHAPES = [(1, 1, 1), (3, 2049, 2), (129, 96, 6), (17, 5376, 6)]


def make_inputs(num_rows, dim, num_mod, device, generator):
    x = (2 * torch.randn(num_rows, dim, device=device, generator=generator)).bfloat16()
    weight = (1 + 0.2 * torch.randn(dim, device=device, generator=generator)).bfloat16()
    scale, shift = torch.randn(2, num_mod, dim, device=device, generator=generator).bfloat16()
    index = torch.randint(num_mod, (num_rows,), device=device, dtype=torch.int32, generator=generator)
    return x, weight, scale, shift, index


def integers(x):
    """Small integers: their squares add up exactly, in every order."""
    return (4 * x).round().clamp(-16, 16)


def assert_equal(out, expected):
    assert torch.equal(out.scales, expected.scales)
    assert torch.equal(out.values.view(torch.uint8), expected.values.view(torch.uint8))


@pytest.mark.triton
@pytest.mark.parametrize(("num_rows", "dim", "num_mod"), [(0, 64, 3), *SHAPES])
def test_is_bit_identical_where_the_squares_add_up_exactly(num_rows, dim, num_mod, device, generator):
    x, *rest = make_inputs(num_rows, dim, num_mod, device, generator)
    x = integers(x)
    with backend("triton"):
        out = norm_modulate_fp8(x, *rest, EPS)
    assert out.values.shape == (num_rows, dim)
    assert_equal(out, norm_modulate_fp8_ref(x, *rest, EPS))


@pytest.mark.triton
@pytest.mark.parametrize(("num_rows", "dim", "num_mod"), SHAPES)
def test_is_close_to_reference(num_rows, dim, num_mod, device, generator):
    inputs = make_inputs(num_rows, dim, num_mod, device, generator)
    with backend("triton"):
        out = norm_modulate_fp8(*inputs, EPS)
    expected = norm_modulate_fp8_ref(*inputs, EPS)
    # The largest value of a row may be its bf16 neighbour: its scale moves by 2**-8, and each value by a step at most.
    torch.testing.assert_close(out.scales, expected.scales, rtol=2**-7, atol=0)
    same_scale = out.scales == expected.scales
    assert same_scale.float().mean() >= 0.9
    different = out.values.float() != expected.values.float()
    assert different[same_scale].float().mean() <= NORM_DIFFERENT_SHARE
    torch.testing.assert_close(out.dequantize(), expected.dequantize(), rtol=2**-2, atol=expected.scales.max().item())


@pytest.mark.triton
def test_reads_strided_rows_in_place(device, generator):
    x, weight, _, _, index = make_inputs(37, 300, 6, device, generator)
    x = integers(x)[:, 40:240]
    weight = weight[:200]
    table = torch.randn(6, 6 * 200, device=device, generator=generator).bfloat16()
    flat, split = table.chunk(6, dim=-1), table.view(6, 6, 200).unbind(1)
    for shift, scale in ((flat[0], flat[1]), (split[3], split[4])):
        with backend("triton"):
            out = norm_modulate_fp8(x, weight, scale, shift, index, EPS)
        expected = norm_modulate_fp8_ref(x.contiguous(), weight, scale.contiguous(), shift.contiguous(), index, EPS)
        assert_equal(out, expected)


@pytest.mark.gpu
@pytest.mark.triton
def test_addresses_pass_2_to_the_31(device, generator):
    num_rows, dim = 399_872, 5376  # 2.15e9 elements, 4.3 GB
    last = slice(num_rows - 64, num_rows)
    x = torch.zeros(num_rows, dim, device=device, dtype=torch.bfloat16)
    tail, weight, scale, shift, _ = make_inputs(64, dim, 6, device, generator)
    x[last] = integers(tail)
    index = torch.randint(6, (num_rows,), device=device, dtype=torch.int32, generator=generator)
    with backend("triton"):
        out = norm_modulate_fp8(x, weight, scale, shift, index, EPS)
    expected = norm_modulate_fp8_ref(x[last], weight, scale, shift, index[last], EPS)
    assert torch.equal(out.scales[last], expected.scales)
    assert torch.equal(out.values[last].view(torch.uint8), expected.values.view(torch.uint8))
