"""What a linear in 8 bits computes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from comfyui_h3.h3core.models.fp8_linear import Fp8Linear, multiplies_fp8
from comfyui_h3.kernels.quantize_fp8 import quantize_fp8

# e4m3 has 3 bits of mantissa: a rounding is off by 2**-4 at most, evenly spread: 2.1 % of a value in the mean square,
# at the lower end of a binade 3.6 %. A product of two such numbers is off by the root of twice the square.
ONE_ROUNDING, TWO_ROUNDINGS = 0.03, 0.042


def relative_rms(out, expected):
    return float((out.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def make(generator, num_out=96, num_in=256, bias=True):
    """A linear in bfloat16, its channels of sizes from 0.01 to 100, and the FP8 one of the same weights."""
    linear = nn.Linear(num_in, num_out, bias=bias).bfloat16().requires_grad_(False)
    size = torch.logspace(-2, 2, num_out)[:, None]
    linear.weight.copy_(size * torch.randn(num_out, num_in, generator=generator))
    fp8 = Fp8Linear(num_in, num_out, bias=bias)
    fp8.quantize(linear.weight)
    if bias:
        fp8.bias.copy_(linear.bias)
    return linear, fp8


def test_weight_has_a_scale_for_each_channel(generator):
    linear, fp8 = make(generator)
    assert fp8.weight.dtype == torch.float8_e4m3fn
    error = (fp8.dequantized() - linear.weight.float()).norm(dim=1) / linear.weight.float().norm(dim=1)
    assert error.min() > 0
    assert error.max() < ONE_ROUNDING


@pytest.mark.parametrize("shape", [(5, 256), (2, 3, 256), (0, 256)])
def test_weight_only_where_the_device_has_no_e4m3(shape, generator):
    linear, fp8 = make(generator)
    x = torch.randn(shape, generator=generator).bfloat16()
    assert not fp8.multiplies_fp8
    out = fp8(x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, F.linear(x, fp8.dequantized().bfloat16(), fp8.bias))
    if x.numel():
        assert 0 < relative_rms(out, linear(x)) < ONE_ROUNDING


def test_quantised_rows_are_multiplied_as_they_are(generator):
    linear, fp8 = make(generator)
    x = torch.randn(33, 256, generator=generator).bfloat16()
    rows = quantize_fp8(x)
    out = fp8(rows)
    exact = rows.dequantize().double() @ fp8.dequantized().double().t() + fp8.bias.double()
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-5)
    assert 0.5 * TWO_ROUNDINGS < relative_rms(out, linear(x)) < TWO_ROUNDINGS


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 17, 4096])
@pytest.mark.parametrize("bias", [False, True])
def test_product_in_8_bits_is_that_of_the_quantised_operands(num_rows, bias, device, generator):
    if not multiplies_fp8(device):
        pytest.skip("this GPU has no e4m3")
    _, fp8 = make(generator, 512, 1024, bias)
    x = torch.randn(num_rows, 1024, generator=generator).bfloat16()
    exact = fp8(quantize_fp8(x))
    fp8.to(device)
    for out in (fp8(x.to(device)), fp8(quantize_fp8(x.to(device)))):
        # The tensor cores keep about 14 bits of a sum.
        assert relative_rms(out.cpu(), exact) < 2**-8


@pytest.mark.gpu
def test_weight_only_keeps_rows_in_16_bits(device, generator):
    if not multiplies_fp8(device):
        pytest.skip("this GPU has no e4m3")
    _, fp8 = make(generator, 512, 1024)
    fp8.to(device)
    x = torch.randn(17, 1024, generator=generator).bfloat16().to(device)
    in_8_bits = fp8(x)
    fp8.weight_only = True
    assert not fp8.multiplies_fp8
    expected = F.linear(x, fp8.dequantized().bfloat16(), fp8.bias)
    assert torch.equal(fp8(x), expected)
    assert not torch.equal(in_8_bits, expected)
