import pytest
import torch

from comfyui_h3.kernels.dispatch import backend
from comfyui_h3.kernels.qk_norm_rope_fp8 import qk_norm_rope_fp8, qk_norm_rope_fp8_ref
from comfyui_h3.tests.tolerances import NORM_DIFFERENT_SHARE

EPS = 1e-5
SHAPES = [(1, 1, 16, 12), (7, 3, 32, 24), (33, 4, 128, 96), (5, 2, 64, 64), (9, 3, 24, 0)]  # S, N, H, R


def make_inputs(shape, device, generator):
    """q and k in one packed projection, as small integers: their squares add up exactly, in every order."""
    num_rows, num_heads, head_dim, rotated = shape
    packed = torch.randint(-9, 10, (num_rows, 3, num_heads, head_dim), device=device, generator=generator).bfloat16()
    q_weight, k_weight = (1 + 0.3 * torch.randn(2, head_dim, device=device, generator=generator)).bfloat16()
    angle = 100 * torch.randn(num_rows, rotated // 2, device=device, generator=generator)
    return packed[:, 0], packed[:, 1], q_weight, k_weight, angle.cos().bfloat16(), angle.sin().bfloat16()


@pytest.mark.triton
@pytest.mark.parametrize("shape", SHAPES)
def test_is_bit_identical_where_the_squares_add_up_exactly(shape, device, generator):
    inputs = make_inputs(shape, device, generator)
    with backend("triton"):
        out = qk_norm_rope_fp8(*inputs, EPS)
    for got, expected in zip(out, qk_norm_rope_fp8_ref(*inputs, EPS), strict=True):
        assert torch.equal(got.scales, expected.scales)
        assert torch.equal(got.values.view(torch.uint8), expected.values.view(torch.uint8))


@pytest.mark.triton
@pytest.mark.parametrize("shape", SHAPES)
def test_is_close_to_reference(shape, device, generator):
    q, k, *rest = make_inputs(shape, device, generator)
    q, k = (x + torch.randn(x.shape, device=device, generator=generator).bfloat16() for x in (q, k))
    with backend("triton"):
        out = qk_norm_rope_fp8(q, k, *rest, EPS)
    for got, expected in zip(out, qk_norm_rope_fp8_ref(q, k, *rest, EPS), strict=True):
        assert torch.equal(got.scales, expected.scales)
        assert (got.values.float() != expected.values.float()).float().mean() <= 2 * NORM_DIFFERENT_SHARE


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_the_largest_head_there_is_fits_the_scale(size, device):
    """One channel alone, with the largest weight: sqrt(H) times that, whatever its size was and however it turns."""
    q = torch.zeros(4, 2, 32, device=device)
    q[:, 0, 3] = size
    q[:, 1, 30] = -size
    weight = torch.full((32,), 0.5, device=device)
    weight[[3, 30]] = 2
    angle = torch.linspace(0, 6, 4, device=device)[:, None].expand(4, 12)
    out, _ = qk_norm_rope_fp8(q, q, weight, weight, angle.cos(), angle.sin(), 1e-12)
    lengths = out.dequantize().norm(dim=-1)
    torch.testing.assert_close(lengths, torch.full_like(lengths, 2 * 32**0.5), rtol=2**-4, atol=0)
    assert out.values[:, 1, 30].float().tolist() == [-448.0] * 4


@pytest.mark.gpu
@pytest.mark.triton
def test_addresses_pass_2_to_the_31(device, generator):
    q, k, *weights, cos, sin = make_inputs((64, 56, 128, 96), device, generator)
    packed = torch.ones(100_032, 3, 56, 128, device=device, dtype=torch.bfloat16)  # 2.15e9 elements, 4.3 GB
    packed[-64:, 0], packed[-64:, 1] = q, k
    cos, sin = cos.repeat(1563, 1), sin.repeat(1563, 1)
    with backend("triton"):
        out = qk_norm_rope_fp8(packed[:, 0], packed[:, 1], *weights, cos, sin, EPS)
    for got, expected in zip(out, qk_norm_rope_fp8_ref(q, k, *weights, cos[:64], sin[:64], EPS), strict=True):
        assert torch.equal(got.values[-64:].view(torch.uint8), expected.values.view(torch.uint8))
