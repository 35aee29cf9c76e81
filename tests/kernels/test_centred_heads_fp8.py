import pytest
import torch

from comfyui_h3.kernels.centred_heads_fp8 import add_mean, centred_heads_fp8, centred_heads_fp8_ref
from comfyui_h3.kernels.dispatch import backend


def integers(shape, device, generator):
    """Small integers around a mean of their own for each channel: they add up exactly, in every order."""
    low = torch.randint(-40, 40, shape[1:], device=device, generator=generator)
    return (low + torch.randint(20, shape, device=device, generator=generator)).bfloat16()


def assert_equal(out, expected):
    assert torch.equal(out[1], expected[1])
    assert torch.equal(out[0].scales, expected[0].scales)
    assert torch.equal(out[0].values.view(torch.uint8), expected[0].values.view(torch.uint8))


@pytest.mark.triton
@pytest.mark.parametrize("shape", [(1, 1, 16), (65, 3, 128), (1030, 2, 24)])
def test_is_bit_identical_where_the_rows_add_up_exactly(shape, device, generator):
    v = integers(shape, device, generator)
    with backend("triton"):
        out = centred_heads_fp8(v)
    assert_equal(out, centred_heads_fp8_ref(v))


@pytest.mark.triton
def test_is_close_to_reference(device, generator):
    size = torch.logspace(-4, 4, 3, device=device)[:, None]
    v = (size * (3 + torch.randn(700, 3, 32, device=device, generator=generator))).bfloat16()
    with backend("triton"):
        heads, mean = centred_heads_fp8(v)
    expected, expected_mean = centred_heads_fp8_ref(v)
    torch.testing.assert_close(mean, expected_mean, rtol=2**-7, atol=0)  # its bf16 neighbour
    # Then a channel moves by 2**-8 of its mean, which is 3 here, and a value by a step: an eighth of itself.
    torch.testing.assert_close(heads.dequantize() / size, expected.dequantize() / size, rtol=0.13, atol=0.04)


@pytest.mark.triton
def test_reads_a_view_of_a_packed_projection(device, generator):
    packed = integers((70, 3, 4, 32), device, generator)
    with backend("triton"):
        out = centred_heads_fp8(packed[:, 2])
    assert out[0].values.is_contiguous()
    assert_equal(out, centred_heads_fp8_ref(packed[:, 2].contiguous()))


def test_mean_and_centred_values_are_the_values(device, generator):
    v = (5 + torch.randn(64, 2, 16, device=device, generator=generator)).bfloat16()
    heads, mean = centred_heads_fp8(v)
    assert (mean.float() - v.float().mean(0)).abs().max() <= 2**-8 * 8
    assert heads.values.float().abs().amax((0, 2)).tolist() == [448.0] * 2
    # A rounding to e4m3 moves a value by a sixteenth of itself at most; here that of the difference alone.
    difference = v.float() - mean.float()
    assert (heads.dequantize() - difference).abs().max() <= difference.abs().max() / 16


@pytest.mark.triton
@pytest.mark.parametrize("shape", [(1, 1, 16), (65, 3, 128), (9, 40, 56)])
def test_mean_is_added_as_torch_adds_it(shape, device, generator):
    out = torch.randn(shape, device=device, generator=generator).bfloat16()
    mean = (3 * torch.randn(shape[1:], device=device, generator=generator)).bfloat16()
    expected = out + mean
    with backend("triton"):
        assert torch.equal(add_mean(out, mean), expected)


@pytest.mark.gpu
@pytest.mark.triton
def test_addresses_pass_2_to_the_31(device, generator):
    packed = torch.zeros(100_032, 3, 56, 128, device=device, dtype=torch.bfloat16)  # 2.15e9 elements, 4.3 GB
    packed[-64:] = integers((64, 3, 56, 128), device, generator)
    with backend("triton"):
        out = centred_heads_fp8(packed[:, 2])
    assert_equal(out, centred_heads_fp8_ref(packed[:, 2]))
