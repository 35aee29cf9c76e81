import pytest
import torch

from comfyui_h3.kernels.dispatch import BackendError, backend
from comfyui_h3.kernels.gate_residual import gate_residual, gate_residual_ref


def make_inputs(num_rows, dim, num_mod, device, generator):
    x, o = torch.randn(2, num_rows, dim, device=device, generator=generator).bfloat16()
    gate = torch.randn(num_mod, dim, device=device, generator=generator).bfloat16()
    index = torch.randint(num_mod, (num_rows,), device=device, dtype=torch.int32, generator=generator)
    return x, o, gate, index


@pytest.mark.triton
@pytest.mark.parametrize(
    ("num_rows", "dim", "num_mod"), [(0, 64, 3), (1, 1, 1), (3, 2049, 2), (257, 96, 6), (33, 5376, 6)]
)
def test_is_bit_identical_to_reference(num_rows, dim, num_mod, device, generator):
    inputs = make_inputs(num_rows, dim, num_mod, device, generator)
    expected = gate_residual_ref(*inputs)
    with backend("triton"):
        out = gate_residual(*inputs)
    assert out.shape == (num_rows, dim)
    assert torch.equal(out, expected)


@pytest.mark.triton
def test_reads_strided_rows_in_place(device, generator):
    x, o, _, index = make_inputs(37, 200, 6, device, generator)
    table = torch.randn(6, 6, 200, device=device, generator=generator).bfloat16()
    wide = torch.randn(37, 300, device=device, generator=generator).bfloat16()
    for gate in (table[:, 2], table.flatten(1).chunk(6, dim=-1)[5]):
        expected = gate_residual_ref(wide[:, 90:290], o, gate.contiguous(), index)
        around = wide[:, :90].clone(), wide[:, 290:].clone()
        with backend("triton"):
            out = gate_residual(wide[:, 90:290], o, gate, index)
        assert torch.equal(out, expected)
        assert torch.equal(wide[:, :90], around[0])
        assert torch.equal(wide[:, 290:], around[1])
    expected = gate_residual_ref(x, wide[:, 7:207], table[:, 0], index)
    with backend("triton"):
        out = gate_residual(x, wide[:, 7:207], table[:, 0], index)
    assert torch.equal(out, expected)


@pytest.mark.triton
def test_accepts_an_int64_index(device, generator):
    x, o, gate, index = make_inputs(5, 64, 3, device, generator)
    with backend("triton"):
        out = gate_residual(x.clone(), o, gate, index.long())
        assert torch.equal(out, gate_residual(x, o, gate, index))


@pytest.mark.triton
def test_product_is_rounded_before_the_add(device):
    # gate * o = 1 + 2**-7 + 2**-14, which rounds to 1 + 2**-7: one fused multiply-add would leave 2**-14.
    o = torch.full((1, 64), 1 + 2**-7, device=device, dtype=torch.bfloat16)
    gate = torch.full((1, 64), 1.0, device=device, dtype=torch.bfloat16) + 2**-7
    exact = (1 + 2**-7) ** 2
    rounded = 1 + 2**-6
    assert exact != rounded
    x = torch.full_like(o, -rounded)
    with backend("triton"):
        out = gate_residual(x, o, gate, torch.zeros(1, device=device, dtype=torch.int32))
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.triton
def test_rows_in_one_place_are_not_written_over(device, generator):
    x, o, gate, index = make_inputs(1, 64, 3, device, generator)
    x, o, index = x.expand(5, 64), o.expand(5, 64), index.expand(5).contiguous()
    with backend("triton"), pytest.raises(BackendError, match="all its rows in one place"):
        gate_residual(x, o, gate, index)


def test_fp32_is_plain_arithmetic(device, generator):
    x, o, gate, index = (t.float() if t.is_floating_point() else t for t in make_inputs(9, 40, 3, device, generator))
    expected = x + gate[index.long()] * o
    assert torch.equal(gate_residual(x, o, gate, index), expected)


@pytest.mark.gpu
@pytest.mark.triton
def test_addresses_pass_2_to_the_31(device, generator):
    num_rows, dim = 399_872, 5376  # 2.15e9 elements, 4.3 GB each
    x, o = (torch.zeros(num_rows, dim, device=device, dtype=torch.bfloat16) for _ in range(2))
    last = slice(num_rows - 64, num_rows)
    x[last], o[last], gate, _ = make_inputs(64, dim, 6, device, generator)
    index = torch.randint(6, (num_rows,), device=device, dtype=torch.int32, generator=generator)
    expected = gate_residual_ref(x[last], o[last], gate, index[last])
    with backend("triton"):
        out = gate_residual(x, o, gate, index)
    assert torch.equal(out[last], expected)
