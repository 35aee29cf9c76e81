import pytest
import torch

from comfyui_h3.kernels.dispatch import backend
from comfyui_h3.kernels.split_linear import split_linear, split_linear_ref

# Of the size of an output, which is about 1 here: 22 bits of both factors, and a float32 sum, are errors of the size of
# float32's own (6e-8 each, at random); in float16 they would be a thousand times that.
TOLERANCE = 3e-6


def make_inputs(num_rows, num_outputs, width, device, generator, size=1.0):
    x = size * torch.randn(num_rows, width, device=device, generator=generator)
    weight = torch.randn(num_outputs, width, device=device, generator=generator) * width**-0.5
    return x, weight, torch.randn(num_outputs, device=device, generator=generator)


def exact(x, weight, bias):
    return torch.nn.functional.linear(x.double(), weight.double(), bias.double())


@pytest.mark.triton
@pytest.mark.parametrize("shape", [(1, 128, 64), (130, 256, 128), (257, 128, 192)])
@pytest.mark.parametrize("size", [1.0, 1e-4, 1e6])
def test_is_as_exact_as_float32(shape, size, device, generator):
    x, weight, bias = make_inputs(*shape, device, generator, size)
    with backend("triton"):
        out = split_linear(x, weight, bias)
    assert out.dtype == torch.float32
    assert (out.double() - exact(x, weight, bias)).abs().max() <= TOLERANCE * max(size, 1.0)


@pytest.mark.triton
def test_leading_dimensions_stay(device, generator):
    x, weight, bias = make_inputs(12, 128, 64, device, generator)
    with backend("triton"):
        assert torch.equal(split_linear(x.view(3, 4, 64), weight, bias), split_linear(x, weight, bias).view(3, 4, 128))


@pytest.mark.triton
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(value, device, generator):
    x, weight, bias = make_inputs(4, 128, 64, device, generator)
    x[2, 5] = value
    with backend("triton"):
        assert not split_linear(x, weight, bias)[2].isfinite().any()


def test_other_sizes_and_types_take_the_reference(device, generator, caplog):
    caplog.set_level("INFO")
    x, weight, bias = make_inputs(5, 100, 60, device, generator)
    with backend("triton"):
        assert torch.equal(split_linear(x, weight, bias), split_linear_ref(x, weight, bias))
    assert "not whole blocks of 128 x 64" in caplog.text
    x, weight, bias = (t.double() for t in make_inputs(5, 128, 64, device, generator))
    assert torch.equal(split_linear(x, weight, bias), split_linear_ref(x, weight, bias))


@pytest.mark.gpu
@pytest.mark.triton
def test_at_the_released_size(device, generator):
    x, weight, bias = make_inputs(1797, 3072, 2048, device, generator)
    with backend("triton"):
        out = split_linear(x, weight, bias)
    wanted = exact(x, weight, bias)
    assert (out.double() - wanted).abs().max() <= 3 * TOLERANCE  # 32 times as many products as above
    assert (out.double() - wanted).abs().mean() <= 1e-6
