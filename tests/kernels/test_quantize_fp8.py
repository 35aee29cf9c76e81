import pytest
import torch

from comfyui_h3.kernels._triton import tl, triton
from comfyui_h3.kernels.dispatch import backend
from comfyui_h3.kernels.quantize_fp8 import MIN_SCALE, e4m3_bits, e4m3_ptx, quantize_fp8, quantize_fp8_ref

BLOCK = 4096
CONVERSIONS = [e4m3_bits, pytest.param(e4m3_ptx, marks=pytest.mark.gpu)]


@triton.jit
def _convert_kernel(out_ptr, x_ptr, CONVERSION: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offset, CONVERSION(tl.load(x_ptr + offset)))


def converted(x, conversion):
    """Bits of e4m3 as integers."""
    out = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    _convert_kernel[(x.numel() // BLOCK,)](out, x, CONVERSION=conversion, BLOCK=BLOCK)
    return out


def assert_equal(out, expected):
    assert torch.equal(out.scales, expected.scales)
    assert torch.equal(out.values.view(torch.uint8), expected.values.view(torch.uint8))


@pytest.mark.triton
@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("low", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_converts_every_bf16_neighbourhood_as_torch(low, conversion, device):
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device)
    x = ((high << 16) | low).view(torch.float32)
    x = torch.where(x.isnan(), 0.0, x)
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(converted(x, conversion), expected)


@pytest.mark.triton
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_converts_ties_between_all_neighbours_to_even(conversion, device):
    codes = torch.arange(0x7E, dtype=torch.uint8, device=device)  # finite, not negative, without the largest
    low, high = (c.view(torch.float8_e4m3fn).float() for c in (codes, codes + 1))
    x = torch.zeros(BLOCK, device=device)
    x[: len(codes)] = (low + high) / 2
    even = codes + codes % 2
    assert torch.equal(converted(x, conversion)[: len(codes)], even)
    assert torch.equal(converted(-x, conversion)[: len(codes)], even + 0x80)


@pytest.mark.triton
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_a_nan_converts_to_nan(conversion, device):
    x = torch.full((BLOCK,), float("nan"), device=device)
    assert converted(x, conversion).view(torch.float8_e4m3fn).float().isnan().all()


@pytest.mark.triton
@pytest.mark.parametrize(("num_rows", "dim"), [(0, 64), (1, 1), (3, 2049), (257, 96), (9, 7168)])
def test_is_bit_identical_to_reference(num_rows, dim, device, generator):
    size = torch.logspace(-6, 6, max(num_rows, 1), device=device)[:num_rows, None]
    x = (size * torch.randn(num_rows, dim, device=device, generator=generator)).bfloat16()
    with backend("triton"):
        out = quantize_fp8(x)
    assert out.values.shape == (num_rows, dim)
    assert_equal(out, quantize_fp8_ref(x))


@pytest.mark.triton
def test_reads_strided_rows_in_place(device, generator):
    x = torch.randn(37, 500, device=device, generator=generator).bfloat16()[:, 90:490]
    with backend("triton"):
        out = quantize_fp8(x)
    assert_equal(out, quantize_fp8_ref(x.contiguous()))


@pytest.mark.triton
@pytest.mark.parametrize("name", ["triton", "torch"])
def test_the_largest_value_of_a_row_is_exact_and_zeros_stay(name, device):
    x = torch.tensor([[0.0, 0.0, 0.0, 0.0], [3.0, -1.5, 0.0, 0.75], [-1e-30, 0.0, 0.0, 1e-30]], device=device)
    with backend(name):
        out = quantize_fp8(x.bfloat16())
    assert out.values.float()[1].tolist() == [448.0, -224.0, 0.0, 112.0]
    assert out.dequantize()[0].tolist() == [0.0] * 4
    assert out.scales[[0, 2]].tolist() == pytest.approx([MIN_SCALE] * 2)


@pytest.mark.triton
@pytest.mark.parametrize("name", ["triton", "torch"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_visible(name, value, device):
    x = torch.ones(2, 64, device=device, dtype=torch.bfloat16)
    x[1, 7] = value
    with backend(name):
        out = quantize_fp8(x)
    assert out.dequantize()[0].isfinite().all()
    assert out.dequantize()[1, 7].isnan()


def test_error_is_at_most_half_a_step(device, generator):
    x = torch.randn(64, 512, device=device, generator=generator)
    error = (quantize_fp8(x).dequantize() - x).abs()
    largest = x.abs().amax(-1, keepdim=True)
    # 3 bits of mantissa: 2**-4 of a value; below 2**-6 of the scaled range a fixed step of 2**-9.
    assert (error <= torch.maximum(x.abs() * 2**-4, largest / 448 * 2**-10) * 1.0001).all()


@pytest.mark.gpu
@pytest.mark.triton
def test_addresses_pass_2_to_the_31(device, generator):
    x = torch.zeros(300_032, 7168, device=device, dtype=torch.bfloat16)  # 2.15e9 elements, 4.3 GB
    x[-64:] = torch.randn(64, 7168, device=device, generator=generator).bfloat16()
    with backend("triton"):
        out = quantize_fp8(x)
    expected = quantize_fp8_ref(x[-64:])
    assert torch.equal(out.scales[-64:], expected.scales)
    assert torch.equal(out.values[-64:].view(torch.uint8), expected.values.view(torch.uint8))
