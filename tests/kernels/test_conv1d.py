import pytest
import torch
from torch.nn import functional as F

from comfyui_h3.kernels.conv1d import conv1d, conv1d_ref, conv_transpose1d, conv_transpose1d_ref
from comfyui_h3.kernels.dispatch import BackendError, backend

EPS = 2.0**-24  # of one rounding to float32


def make_inputs(channels, out_channels, num_taps, length, device, generator, *, num_items=2):
    x = torch.randn(num_items, channels, length, device=device, generator=generator)
    weight = torch.randn(out_channels, channels, num_taps, device=device, generator=generator)
    return x, weight, torch.randn(out_channels, device=device, generator=generator)


def check_close(out, expected, scale):
    """Each of the terms of a sum, ``scale`` in absolute values together, is rounded a few times."""
    assert out.shape == expected.shape
    assert ((out.double() - expected).abs() <= 8 * EPS * scale).all()


def run(function, *inputs, **options):
    with backend("triton"):
        return function(*inputs, **options)


SHAPES = [  # channels, out_channels, taps, dilation, length
    (8, 8, 3, 1, 300),
    (8, 1, 7, 1, 257),
    (16, 16, 11, 5, 131),
    (32, 32, 7, 3, 129),
    (64, 96, 3, 5, 63),
    (5, 3, 11, 3, 1),
    (2, 70, 7, 5, 2),
]


@pytest.mark.triton
@pytest.mark.parametrize(("channels", "out_channels", "num_taps", "dilation", "length"), SHAPES)
def test_is_the_convolution_in_float64(channels, out_channels, num_taps, dilation, length, device, generator):
    x, weight, bias = make_inputs(channels, out_channels, num_taps, length, device, generator)
    out = run(conv1d, x, weight, bias, dilation)
    expected = conv1d_ref(x.double(), weight.double(), bias.double(), dilation, None, None, 1)
    scale = conv1d_ref(x.double().abs(), weight.double().abs(), bias.double().abs(), dilation, None, None, 1)
    check_close(out, expected, scale)


@pytest.mark.triton
@pytest.mark.parametrize("given", [(), ("residual",), ("total",), ("residual", "total")])
@pytest.mark.parametrize("has_bias", [False, True])
def test_adds_on_the_way_and_divides_once(given, has_bias, device, generator):
    x, weight, bias = make_inputs(16, 8, 3, 40, device, generator)
    bias = bias if has_bias else None
    addends = {name: torch.randn(2, 8, 40, device=device, generator=generator) for name in given}
    out = run(conv1d, x, weight, bias, 1, **addends, divisor=3)
    expected = F.conv1d(x.double(), weight.double(), None if bias is None else bias.double(), padding=1)
    expected = (expected + sum(t.double() for t in addends.values())) / 3
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


TRANSPOSED = [(16, 8, 9, 5, 33), (32, 16, 4, 2, 200), (4, 2, 4, 2, 1), (64, 32, 9, 5, 2)]


@pytest.mark.triton
@pytest.mark.parametrize(("channels", "out_channels", "num_taps", "stride", "length"), TRANSPOSED)
def test_transposed_is_that_of_float64(channels, out_channels, num_taps, stride, length, device, generator):
    x, weight, bias = make_inputs(out_channels, channels, num_taps, length, device, generator)
    x = torch.randn(2, channels, length, device=device, generator=generator)
    bias = bias[:1].expand(out_channels).contiguous() * torch.arange(out_channels, device=device)
    out = run(conv_transpose1d, x, weight, bias, stride)
    expected = conv_transpose1d_ref(x.double(), weight.double(), bias.double(), stride)
    scale = conv_transpose1d_ref(x.double().abs(), weight.double().abs(), bias.double().abs(), stride)
    assert out.shape == (2, out_channels, stride * length)
    check_close(out, expected, scale)


@pytest.mark.triton
def test_equal_values_get_equal_bits_whatever_the_strides_and_neighbours(device, generator):
    x, weight, bias = make_inputs(8, 8, 7, 300, device, generator)
    out = run(conv1d, x, weight, bias, 3)
    assert torch.equal(run(conv1d, x.mT.contiguous().mT, weight, bias, 3), out)
    assert torch.equal(run(conv1d, x, weight.mT.contiguous().mT, bias, 3), out)
    assert torch.equal(run(conv1d, x[1:], weight, bias, 3), out[1:])
    assert out.mT.is_contiguous()


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize(("channels", "length"), [(512, 2025), (128, 20_250), (8, 324_000)])
def test_is_nearer_to_float64_than_one_tf32_product_by_far(channels, length, device, generator):
    x, weight, bias = make_inputs(channels, channels, 7, length, device, generator)
    out = run(conv1d, x, weight, bias, 3)
    expected = conv1d_ref(*(t.double() for t in (x, weight, bias)), 3, None, None, 1)
    assert (out - expected).std() <= 4e-7 * expected.std()  # one TF32 product: about 3e-4


@pytest.mark.gpu
@pytest.mark.triton
def test_addresses_pass_2_to_the_31(device, generator):
    x = torch.zeros(3, 2**27, 8, device=device).mT  # three items of 4.3 GB
    x[2, :, -64:] = torch.randn(8, 64, device=device, generator=generator)
    _, weight, bias = make_inputs(8, 8, 3, 1, device, generator)
    out = run(conv1d, x, weight, bias, 1)
    assert torch.equal(out[2, :, -32:], run(conv1d, x[2:, :, -64:].contiguous(), weight, bias, 1)[0, :, -32:])


@pytest.mark.triton
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x, *rest: (x.double(), *rest), "x is float64, not float32"),
        (lambda x, weight, bias: (x, weight, bias.half()), "bias is float16, not float32"),
        (lambda x, *rest: (x.clone().requires_grad_(), *rest), "x requires a gradient"),
        (lambda x, weight, bias: (x, weight[..., :1], bias), "the weight has 1 taps"),
    ],
)
def test_refuses_what_the_kernel_cannot_read(change, reason, device, generator):
    inputs = change(*make_inputs(8, 8, 3, 8, device, generator))
    with backend("triton"), pytest.raises(BackendError, match=reason):
        conv1d(*inputs)
