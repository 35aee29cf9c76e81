import pytest
import torch

from comfyui_h3.kernels.dispatch import backend
from comfyui_h3.kernels.scaled_residual_norm import scaled_residual_norm, scaled_residual_norm_ref

EPS = 1e-5

# A row's squares are added up in another order, so the fp32 mean differs in its last bits. fp32 is 2**13 times finer
# than fp16: a few units in the last place of the mean move about one element in 10**3 to its fp16 neighbour.
DIFFERENT_SHARE = 4e-3

SHAPES = [(1, 1), (3, 5, 2), (7, 32), (2, 9, 96), (2, 3, 2048)]


def make_inputs(shape, device, generator):
    x = torch.randn(shape, device=device, generator=generator)
    y = torch.randn(shape, device=device, generator=generator).half()
    scale = 0.5 + 0.1 * torch.randn(shape[-1], device=device, generator=generator)
    weight = 1 + 0.2 * torch.randn(shape[-1], device=device, generator=generator)
    return x, y, scale, weight


def steps_apart(a, b):
    """How many fp16 values lie between."""
    a, b = (torch.where(x.view(torch.int16) < 0, -(x.view(torch.int16) & 0x7FFF), x.view(torch.int16)) for x in (a, b))
    return (a.int() - b.int()).abs()


@pytest.mark.triton
@pytest.mark.parametrize("shape", [(0, 64), *SHAPES])
def test_residual_is_bit_identical_and_norm_close_to_reference(shape, device, generator):
    x, y, scale, weight = make_inputs(shape, device, generator)
    wanted_x = x.clone()
    wanted = scaled_residual_norm_ref(wanted_x, y, scale, weight, EPS, torch.float16)
    with backend("triton"):
        out = scaled_residual_norm(x, y, scale, weight, EPS, torch.float16)
    assert out.dtype == torch.float16
    assert torch.equal(x, wanted_x)
    assert (steps_apart(out, wanted) <= 1).all()
    assert (out != wanted).sum() <= DIFFERENT_SHARE * out.numel()


@pytest.mark.triton
@pytest.mark.parametrize("shape", SHAPES)
def test_is_bit_identical_where_the_squares_add_up_exactly(shape, device, generator):
    x, y, scale, weight = make_inputs(shape, device, generator)
    x, y, scale = (4 * x).round(), (4 * y).round(), torch.ones_like(scale)
    wanted_x = x.clone()
    wanted = scaled_residual_norm_ref(wanted_x, y, scale, weight, EPS, torch.float16)
    with backend("triton"):
        out = scaled_residual_norm(x, y, scale, weight, EPS, torch.float16)
    assert torch.equal(x, wanted_x)
    assert torch.equal(out, wanted)


@pytest.mark.triton
def test_without_a_product_the_residual_stays(device, generator):
    x, _, _, weight = make_inputs((5, 96), device, generator)
    before = x.clone()
    with backend("triton"):
        out = scaled_residual_norm(x, None, None, weight, EPS, torch.float16)
    assert torch.equal(x, before)
    assert steps_apart(out, scaled_residual_norm_ref(x, None, None, weight, EPS, torch.float16)).max() <= 1


@pytest.mark.triton
def test_product_is_rounded_before_the_sum(device):
    # A fused multiply-add would keep what the rounding of the product takes away.
    scale = torch.full((1,), 1 + 2.0**-23, device=device)
    y = torch.tensor([[1 + 2.0**-10]], device=device, dtype=torch.float16)
    product = y.float() * scale
    x = -product
    with backend("triton"):
        scaled_residual_norm(x, y, scale, torch.ones(1, device=device), EPS, torch.float16)
    assert x.item() == 0
    assert y.double().item() * scale.double().item() != product.item(), "the product is exact: the test shows nothing"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types_take_the_reference(dtype, device, generator):
    x, y, scale, weight = make_inputs((4, 32), device, generator)
    wanted_x = x.clone()
    wanted = scaled_residual_norm_ref(wanted_x, y.to(dtype), scale, weight, EPS, dtype)
    out = scaled_residual_norm(x, y.to(dtype), scale, weight, EPS, dtype)
    assert out.dtype == dtype
    assert torch.equal(out, wanted)
    assert torch.equal(x, wanted_x)


def test_reference_is_the_formula():
    x, y, scale, weight = make_inputs((6, 48), torch.device("cpu"), torch.Generator().manual_seed(0))
    total = x.double() + y.double() * scale.double()
    wanted = total / (total.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    out = scaled_residual_norm_ref(x, y.float(), scale, weight, EPS, torch.float32)
    torch.testing.assert_close(x, total.float(), rtol=0, atol=1e-6)
    torch.testing.assert_close(out, wanted.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.triton
def test_addresses_pass_2_to_the_31(device, generator):
    x = torch.zeros(1_050_000, 2048, device=device)  # 2.15e9 elements, 8.6 GB
    y = torch.zeros(1_050_000, 2048, device=device, dtype=torch.float16)
    last, y[-64:], scale, weight = make_inputs((64, 2048), device, generator)
    x[-64:] = last
    wanted = scaled_residual_norm_ref(last, y[-64:], scale, weight, EPS, torch.float16)
    with backend("triton"):
        out = scaled_residual_norm(x, y, scale, weight, EPS, torch.float16)
    assert torch.equal(x[-64:], last)
    assert steps_apart(out[-64:], wanted).max() <= 1
