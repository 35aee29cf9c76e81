import pytest
import torch

from comfyui_h3.kernels.dispatch import backend
from comfyui_h3.kernels.swiglu import swiglu, swiglu_ref


@pytest.mark.triton
@pytest.mark.parametrize(("num_rows", "dim"), [(0, 64), (1, 1), (3, 2049), (257, 96), (9, 14336)])
def test_is_bit_identical_to_reference(num_rows, dim, device, generator):
    gate_up = (3 * torch.randn(num_rows, 2 * dim, device=device, generator=generator)).bfloat16()
    with backend("triton"):
        out = swiglu(gate_up.clone())
    assert out.shape == (num_rows, dim)
    assert torch.equal(out, swiglu_ref(gate_up))


@pytest.mark.triton
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_silu_of_every_bf16_gate_is_bit_identical_to_reference(device):
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16).view(torch.bfloat16)
    gate = gate[gate.isfinite()]
    if device.type == "cpu":  # Triton's interpreter converts subnormals wrongly, from bf16 and to it
        gate = gate[(gate == 0) | (gate.abs() >= 2.0**-124)]
    gate_up = torch.stack((gate, torch.ones_like(gate))).view(1, -1)
    with backend("triton"):
        out = swiglu(gate_up.clone())
    assert torch.equal(out, swiglu_ref(gate_up))


@pytest.mark.triton
def test_reads_strided_rows_in_place(device, generator):
    wide = torch.randn(37, 500, device=device, generator=generator).bfloat16()
    gate_up = wide[:, 90:490]
    expected = swiglu_ref(gate_up.contiguous())
    around = wide[:, :90].clone(), wide[:, 290:].clone()
    with backend("triton"):
        out = swiglu(gate_up)
    assert torch.equal(out, expected)
    assert torch.equal(wide[:, :90], around[0])
    assert torch.equal(wide[:, 290:], around[1])


def test_first_half_is_the_gate(device):
    gate_up = torch.tensor([[-100.0, 3.0]], device=device)
    assert swiglu(gate_up).abs().item() < 1e-6  # silu(-100) * 3, and not silu(3) * -100
    assert swiglu(gate_up.flip(-1)).item() < -200


@pytest.mark.gpu
@pytest.mark.triton
def test_addresses_pass_2_to_the_31(device, generator):
    gate_up = torch.zeros(75_008, 28_672, device=device, dtype=torch.bfloat16)  # 2.15e9 elements, 4.3 GB
    gate_up[-64:] = torch.randn(64, 28_672, device=device, generator=generator).bfloat16()
    shard = gate_up[-75_008 // 8 :].clone()
    expected = swiglu_ref(gate_up[-64:])
    with backend("triton"):
        out = swiglu(gate_up)
        eighth = swiglu(shard)
    assert torch.equal(out[-64:], expected)
    assert torch.equal(out[-75_008 // 8 :], eighth)
