import pytest
import torch

from comfyui_h3.kernels._triton import tl, triton
from comfyui_h3.kernels.rounding import round_bf16_bits, round_bf16_ptx

BLOCK = 4096

pytestmark = [
    pytest.mark.triton,
    pytest.mark.parametrize("rounding", [round_bf16_bits, pytest.param(round_bf16_ptx, marks=pytest.mark.gpu)]),
]


@triton.jit
def _round_kernel(out_ptr, x_ptr, ROUNDING: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offset, ROUNDING(tl.load(x_ptr + offset)))


def rounded(x, rounding):
    out = torch.empty_like(x)
    _round_kernel[(x.numel() // BLOCK,)](out, x, ROUNDING=rounding, BLOCK=BLOCK)
    return out


# Below, on and above the tie between two bf16 values, and next to the ends.
@pytest.mark.parametrize("low", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_rounds_every_bf16_neighbourhood_to_nearest_even(low, rounding, device):
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device)  # sign, exponent and mantissa of every bf16
    x = ((high << 16) | low).view(torch.float32)
    torch.testing.assert_close(rounded(x, rounding), x.bfloat16().float(), rtol=0, atol=0, equal_nan=True)


def test_keeps_infinities_and_overflows_to_them(rounding, device):
    x = torch.zeros(BLOCK, device=device)
    x[:3] = torch.tensor([float("inf"), float("-inf"), 3.4e38])
    assert rounded(x, rounding)[:3].tolist() == [float("inf"), float("-inf"), float("inf")]


def test_result_is_exact_in_bf16(rounding, device, generator):
    out = rounded(torch.randn(BLOCK, device=device, generator=generator), rounding)
    assert torch.equal(out, out.bfloat16().float())
