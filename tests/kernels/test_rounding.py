import pytest
import torch

from comfyui_h3.kernels._triton import tl, triton
from comfyui_h3.kernels.rounding import add_bf16, mul_bf16, round_bf16_bits, round_bf16_ptx, to_bf16

BLOCK = 4096

pytestmark = pytest.mark.triton

each_rounding = pytest.mark.parametrize(
    "rounding", [round_bf16_bits, pytest.param(round_bf16_ptx, marks=pytest.mark.gpu)]
)


@triton.jit
def _round_kernel(out_ptr, x_ptr, ROUNDING: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offset, ROUNDING(tl.load(x_ptr + offset)))


def rounded(x, rounding):
    out = torch.empty_like(x)
    _round_kernel[(x.numel() // BLOCK,)](out, x, ROUNDING=rounding, BLOCK=BLOCK)
    return out


@triton.jit
def _apply_kernel(out_ptr, a_ptr, b_ptr, OPERATION: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offset, OPERATION(tl.load(a_ptr + offset), tl.load(b_ptr + offset)))


@triton.jit
def _to_bf16_kernel(out_ptr, x_ptr, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offset, to_bf16(tl.load(x_ptr + offset)))


@pytest.mark.parametrize(("operation", "eager"), [(mul_bf16, torch.mul), (add_bf16, torch.add)], ids=["*", "+"])
@pytest.mark.parametrize("shift", [0, 7, -30])
def test_one_operation_rounds_like_eager(operation, eager, shift, device, generator):
    a, b = torch.randn(2, 2**18, device=device, generator=generator).bfloat16()
    b = b * 2.0**shift  # terms of unlike size
    a[:4] = torch.tensor([0.0, -0.0, float("inf"), 3.3e38])
    b[:4] = torch.tensor([-0.0, -0.0, 1.0, 3.3e38])
    out = torch.empty_like(a)
    _apply_kernel[(a.numel() // BLOCK,)](out, a, b, OPERATION=operation, BLOCK=BLOCK)
    expected = eager(a, b)
    assert torch.equal(out, expected)
    assert torch.equal(out.signbit(), expected.signbit())


@pytest.mark.parametrize("low", [0x0000, 0x7FFF, 0x8000, 0x8001])
def test_to_bf16_rounds_to_nearest_even(low, device):
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device)
    x = ((high << 16) | low).view(torch.float32)
    x = x[x.isnan().logical_not() & (x.abs() >= 2.0**-124)]  # Triton's interpreter converts subnormals wrongly
    x = torch.nn.functional.pad(x, (0, -len(x) % BLOCK), value=1.0)
    out = torch.empty_like(x, dtype=torch.bfloat16)
    _to_bf16_kernel[(x.numel() // BLOCK,)](out, x, BLOCK=BLOCK)
    assert torch.equal(out, x.bfloat16())


# Below, on and above the tie between two bf16 values, and next to the ends.
@each_rounding
@pytest.mark.parametrize("low", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_rounds_every_bf16_neighbourhood_to_nearest_even(low, rounding, device):
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device)  # sign, exponent and mantissa of every bf16
    x = ((high << 16) | low).view(torch.float32)
    torch.testing.assert_close(rounded(x, rounding), x.bfloat16().float(), rtol=0, atol=0, equal_nan=True)


@each_rounding
def test_keeps_infinities_and_overflows_to_them(rounding, device):
    x = torch.zeros(BLOCK, device=device)
    x[:3] = torch.tensor([float("inf"), float("-inf"), 3.4e38])
    assert rounded(x, rounding)[:3].tolist() == [float("inf"), float("-inf"), float("inf")]


@each_rounding
def test_result_is_exact_in_bf16(rounding, device, generator):
    out = rounded(torch.randn(BLOCK, device=device, generator=generator), rounding)
    assert torch.equal(out, out.bfloat16().float())
