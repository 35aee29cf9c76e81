import pytest
import torch

from comfyui_h3.kernels.dispatch import backend
from comfyui_h3.kernels.gate_residual import gate_residual
from comfyui_h3.kernels.gate_residual_norm import gate_residual_norm, gate_residual_norm_ref
from comfyui_h3.kernels.norm_modulate import norm_modulate
from comfyui_h3.tests.tolerances import NORM_DIFFERENT_SHARE

EPS = 1e-5

SHAPES = [(0, 64, 3), (1, 1, 1), (3, 2049, 2), (129, 96, 6), (17, 5376, 6)]


def make_inputs(num_rows, dim, num_mod, device, generator):
    x, o = (2 * torch.randn(2, num_rows, dim, device=device, generator=generator)).bfloat16()
    weight = (1 + 0.2 * torch.randn(dim, device=device, generator=generator)).bfloat16()
    shift, scale, gate = torch.randn(num_mod, 3 * dim, device=device, generator=generator).bfloat16().chunk(3, dim=-1)
    index = torch.randint(num_mod, (num_rows,), device=device, dtype=torch.int32, generator=generator)
    return x, o, gate, weight, scale, shift, index


@pytest.mark.triton
@pytest.mark.parametrize("shape", SHAPES)
def test_is_bit_identical_to_the_two_kernels_one_after_the_other(shape, device, generator):
    x, o, gate, weight, scale, shift, index = make_inputs(*shape, device, generator)
    with backend("triton"):
        stream = gate_residual(x.clone(), o, gate, index)
        h = norm_modulate(stream, weight, scale, shift, index, EPS)
        out = gate_residual_norm(x, o, gate, weight, scale, shift, index, EPS)
    assert torch.equal(out[0], stream)
    assert torch.equal(out[1], h)


@pytest.mark.triton
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_reference(shape, device, generator):
    inputs = make_inputs(*shape, device, generator)
    stream, h = gate_residual_norm_ref(*inputs, EPS)
    with backend("triton"):
        out = gate_residual_norm(*inputs, EPS)
    assert torch.equal(out[0], stream)
    assert out[1].isfinite().all()
    if h.numel():
        assert (out[1] != h).float().mean() <= NORM_DIFFERENT_SHARE


@pytest.mark.triton
def test_reads_and_writes_strided_rows(device, generator):
    x, o, gate, weight, scale, shift, index = make_inputs(37, 200, 6, device, generator)
    wide = torch.randn(37, 500, device=device, generator=generator).bfloat16()
    wide[:, 50:250], wide[:, 260:460] = x, o
    before = wide.clone()
    with backend("triton"):
        expected = gate_residual_norm(x, o, gate, weight, scale, shift, index, EPS)
        out = gate_residual_norm(wide[:, 50:250], wide[:, 260:460], gate, weight, scale, shift, index, EPS)
    assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
    for untouched in (slice(0, 50), slice(250, 260), slice(460, 500)):
        assert torch.equal(wide[:, untouched], before[:, untouched])


@pytest.mark.gpu
@pytest.mark.triton
def test_addresses_pass_2_to_the_31(device, generator):
    num_rows, dim = 399_872, 5376  # 2.15e9 elements, 4.3 GB each
    x, o = (torch.zeros(num_rows, dim, device=device, dtype=torch.bfloat16) for _ in range(2))
    last = slice(num_rows - 64, num_rows)
    x[last], o[last], *tables, _ = make_inputs(64, dim, 6, device, generator)
    index = torch.randint(6, (num_rows,), device=device, dtype=torch.int32, generator=generator)
    with backend("triton"):
        expected = gate_residual_norm(x[last].clone(), o[last].clone(), *tables, index[last], EPS)
        out = gate_residual_norm(x, o, *tables, index, EPS)
    assert all(torch.equal(a[last], b) for a, b in zip(out, expected, strict=True))
