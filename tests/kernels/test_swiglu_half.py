import pytest
import torch

from comfyui_h3.kernels.dispatch import backend
from comfyui_h3.kernels.swiglu_half import swiglu_half, swiglu_half_ref


def check_equal(out, wanted):
    """Bit by bit on a GPU. On a CPU the exponentials of NumPy, in the interpreter, and of PyTorch differ in their last
    bit, which moves a silu that is nearly a tie to its neighbour, and then the product by up to two steps."""
    if out.device.type == "cuda":
        assert torch.equal(out, wanted)
        return
    assert (out != wanted).sum() <= 1e-3 * out.numel()
    torch.testing.assert_close(out, wanted, rtol=2**-9, atol=2**-23)


@pytest.mark.triton
@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (3, 2049), (2, 37, 96), (2, 5, 8192)])
def test_is_bit_identical_to_reference(shape, device, generator):
    gate_value = (3 * torch.randn(*shape[:-1], 2 * shape[-1], device=device, generator=generator)).half()
    with backend("triton"):
        out = swiglu_half(gate_value)
    assert out.shape == shape
    check_equal(out, swiglu_half_ref(gate_value))


@pytest.mark.triton
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_silu_of_every_fp16_gate_is_bit_identical_to_reference(device):
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16).view(torch.float16)
    gate = gate[gate.isfinite()]
    gate_value = torch.stack((gate, torch.ones_like(gate))).view(1, -1)
    with backend("triton"):
        out = swiglu_half(gate_value)
    check_equal(out, swiglu_half_ref(gate_value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types_take_the_reference(dtype, device, generator):
    gate_value = torch.randn(3, 32, device=device, generator=generator).to(dtype)
    assert torch.equal(swiglu_half(gate_value), swiglu_half_ref(gate_value))


def test_strided_rows_take_the_reference(device, generator):
    gate_value = torch.randn(4, 100, device=device, generator=generator).half()[:, 10:42]
    assert torch.equal(swiglu_half(gate_value), swiglu_half_ref(gate_value.contiguous()))


def test_first_half_is_the_gate(device):
    gate_value = torch.tensor([[-100.0, 3.0]], device=device, dtype=torch.float16)
    assert swiglu_half(gate_value).abs().item() < 1e-6  # silu(-100) * 3, and not silu(3) * -100
    assert swiglu_half(gate_value.flip(-1)).item() < -200


@pytest.mark.gpu
@pytest.mark.triton
def test_addresses_pass_2_to_the_31(device, generator):
    gate_value = torch.zeros(132_000, 16_384, device=device, dtype=torch.float16)  # 2.16e9 elements, 4.3 GB
    gate_value[-64:] = torch.randn(64, 16_384, device=device, generator=generator).half()
    with backend("triton"):
        out = swiglu_half(gate_value)
    assert torch.equal(out[-64:], swiglu_half_ref(gate_value[-64:]))
