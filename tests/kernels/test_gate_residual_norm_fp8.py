import pytest
import torch

from comfyui_h3.kernels.dispatch import backend
from comfyui_h3.kernels.gate_residual_norm_fp8 import gate_residual_norm_fp8, gate_residual_norm_fp8_ref
from comfyui_h3.tests.tolerances import NORM_DIFFERENT_SHARE

EPS = 1e-5
SHAPES = [(1, 1, 1), (3, 2049, 2), (129, 96, 6), (17, 5376, 6)]


def make_inputs(num_rows, dim, num_mod, device, generator):
    """A stream and a branch whose gated sum is a small integer: its squares add up exactly, in every order."""
    x, o = (8 * torch.randn(2, num_rows, dim, device=device, generator=generator)).round().clamp(-16, 16).bfloat16()
    gate = torch.randint(-1, 2, (num_mod, dim), device=device, generator=generator).bfloat16()
    weight = (1 + 0.2 * torch.randn(dim, device=device, generator=generator)).bfloat16()
    scale, shift = torch.randn(2, num_mod, dim, device=device, generator=generator).bfloat16()
    index = torch.randint(num_mod, (num_rows,), device=device, dtype=torch.int32, generator=generator)
    return x, o, gate, weight, scale, shift, index


def run(x, *rest):
    """The kernel, and the reference on a copy of the stream, which the kernel writes over."""
    copy = x.clone()
    with backend("triton"):
        out = gate_residual_norm_fp8(x, *rest, EPS)
    return out, gate_residual_norm_fp8_ref(copy, *rest, EPS)


def assert_equal(out, expected):
    assert torch.equal(out[0], expected[0])
    assert torch.equal(out[1].scales, expected[1].scales)
    assert torch.equal(out[1].values.view(torch.uint8), expected[1].values.view(torch.uint8))


@pytest.mark.triton
@pytest.mark.parametrize(("num_rows", "dim", "num_mod"), [(0, 64, 3), *SHAPES])
def test_is_bit_identical_where_the_squares_add_up_exactly(num_rows, dim, num_mod, device, generator):
    assert_equal(*run(*make_inputs(num_rows, dim, num_mod, device, generator)))


@pytest.mark.triton
@pytest.mark.parametrize(("num_rows", "dim", "num_mod"), SHAPES)
def test_is_close_to_reference(num_rows, dim, num_mod, device, generator):
    x, o, gate, *rest = make_inputs(num_rows, dim, num_mod, device, generator)
    noise = torch.randn(2, num_rows, dim, device=device, generator=generator).bfloat16()
    gate = gate + torch.randn(gate.shape, device=device, generator=generator).bfloat16()
    out, expected = run(x + noise[0], o + noise[1], gate, *rest)
    assert torch.equal(out[0], expected[0])
    # The largest value of a row may be its bf16 neighbour: its scale moves by 2**-8, and each value by a step at most.
    torch.testing.assert_close(out[1].scales, expected[1].scales, rtol=2**-7, atol=0)
    same_scale = out[1].scales == expected[1].scales
    assert same_scale.float().mean() >= 0.9
    different = out[1].values.float() != expected[1].values.float()
    assert different[same_scale].float().mean() <= NORM_DIFFERENT_SHARE


@pytest.mark.triton
def test_reads_and_writes_strided_rows_in_place(device, generator):
    wide, o, _, weight, _, _, index = make_inputs(37, 300, 6, device, generator)
    x, o, weight = wide[:, 40:240], o[:, 100:], weight[:200]
    table = torch.randint(-2, 3, (6, 6 * 200), device=device, generator=generator).bfloat16()
    shift, scale, gate, *_ = table.chunk(6, dim=-1)
    before = wide.clone()
    out, expected = run(x, o, gate, weight, scale, shift, index)
    assert_equal(out, expected)
    assert torch.equal(wide[:, :40], before[:, :40])
    assert torch.equal(wide[:, 240:], before[:, 240:])
