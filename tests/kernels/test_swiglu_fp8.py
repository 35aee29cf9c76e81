import pytest
import torch

from comfyui_h3.kernels.dispatch import backend
from comfyui_h3.kernels.swiglu_fp8 import swiglu_fp8, swiglu_fp8_ref


def assert_equal(out, expected):
    assert torch.equal(out.scales, expected.scales)
    assert torch.equal(out.values.view(torch.uint8), expected.values.view(torch.uint8))


@pytest.mark.triton
@pytest.mark.parametrize(("num_rows", "dim"), [(0, 64), (1, 1), (3, 2049), (257, 96), (9, 14336)])
def test_is_bit_identical_to_reference(num_rows, dim, device, generator):
    gate_up = (3 * torch.randn(num_rows, 2 * dim, device=device, generator=generator)).bfloat16()
    with backend("triton"):
        out = swiglu_fp8(gate_up)
    assert out.values.shape == (num_rows, dim)
    assert_equal(out, swiglu_fp8_ref(gate_up))


@pytest.mark.triton
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_silu_of_every_bf16_gate_is_bit_identical_to_reference(device):
    """A gate in each row, beside 0: it is the largest value, so a neighbour of its silu shows in the scale."""
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16).view(torch.bfloat16)
    gate = gate[gate.isfinite() & (gate.abs() >= 2.0**-20)]  # below, the smallest scale hides it
    if device.type == "cpu":  # one program at a time, in Python
        gate = gate[:: len(gate) // 500]
    gate_up = torch.stack((gate, torch.zeros_like(gate), torch.ones_like(gate), torch.ones_like(gate)), dim=1)
    with backend("triton"):
        out = swiglu_fp8(gate_up)
    assert_equal(out, swiglu_fp8_ref(gate_up))


@pytest.mark.triton
def test_reads_strided_rows_in_place(device, generator):
    wide = torch.randn(37, 500, device=device, generator=generator).bfloat16()
    gate_up = wide[:, 90:490]
    with backend("triton"):
        out = swiglu_fp8(gate_up)
    assert_equal(out, swiglu_fp8_ref(gate_up.contiguous()))


@pytest.mark.gpu
@pytest.mark.triton
def test_addresses_pass_2_to_the_31(device, generator):
    gate_up = torch.zeros(150_016, 28_672, device=device, dtype=torch.bfloat16)  # 2.15e9 products
    gate_up[-64:] = torch.randn(64, 28_672, device=device, generator=generator).bfloat16()
    with backend("triton"):
        out = swiglu_fp8(gate_up)
    expected = swiglu_fp8_ref(gate_up[-64:])
    assert torch.equal(out.scales[-64:], expected.scales)
    assert torch.equal(out.values[-64:].view(torch.uint8), expected.values.view(torch.uint8))
