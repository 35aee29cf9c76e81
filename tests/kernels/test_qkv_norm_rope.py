import pytest
import torch

from comfyui_h3.kernels.dispatch import backend
from comfyui_h3.kernels.qkv_norm_rope import qkv_norm_rope, qkv_norm_rope_ref

EPS = 1e-5

# The squares of a head are added up in another order, so the fp32 mean differs in its last bits, and one normed element
# in 10**3 or so is its fp16 neighbour: fp32 is 2**13 times finer. A rotated channel is made of two of them.
DIFFERENT_SHARE = 4e-3
# A step of each factor, at most twice a step of its product, and the roundings of two products and of their sum.
STEPS = 6

SHAPES = [  # B, S, N, H, R
    (1, 1, 1, 2, 2),
    (2, 5, 2, 16, 12),  # the tiny model
    (1, 7, 3, 48, 24),
    (2, 3, 5, 64, 64),  # every channel rotates
    (2, 4, 32, 64, 48),  # H3
]


def make_inputs(shape, device, generator):
    num_tiles, num_rows, num_heads, head_dim, rotary_dim = shape
    qkv = (2 * torch.randn(num_tiles, num_rows, num_heads, 3, head_dim, device=device, generator=generator)).half()
    angle = 100 * torch.randn(num_rows, rotary_dim // 2, device=device, generator=generator)
    return qkv, angle.cos().half(), angle.sin().half()


def step_of(x):
    """The step between neighbouring fp16 values at ``x``, in fp32: fp16 has 11 significant bits."""
    return torch.ldexp(torch.ones_like(x, dtype=torch.float32), torch.frexp(x.float().abs()).exponent - 11)


@pytest.mark.triton
@pytest.mark.parametrize("shape", [(0, 4, 2, 16, 12), *SHAPES])
def test_is_bit_identical_where_the_squares_add_up_exactly(shape, device, generator):
    qkv, cos, sin = make_inputs(shape, device, generator)
    qkv = (4 * qkv).round().clamp(-16, 16)
    with backend("triton"):
        out = qkv_norm_rope(qkv, cos, sin, EPS)
    for got, wanted in zip(out, qkv_norm_rope_ref(qkv, cos, sin, EPS), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.triton
@pytest.mark.parametrize("shape", SHAPES)
def test_is_close_to_reference(shape, device, generator):
    qkv, cos, sin = make_inputs(shape, device, generator)
    with backend("triton"):
        q, k, v = qkv_norm_rope(qkv, cos, sin, EPS)
    assert torch.equal(v, qkv[..., 2, :])
    half = cos.shape[-1]
    for part, out, wanted in zip((0, 1), (q, k), qkv_norm_rope_ref(qkv, cos, sin, EPS)[:2], strict=True):
        assert out.is_contiguous()
        assert (out != wanted).float().mean() <= DIFFERENT_SHARE
        x = qkv[..., part, :]
        size = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], eps=EPS).abs()
        pair = torch.maximum(size[..., :half], size[..., half : 2 * half])  # the two products may cancel
        size[..., : 2 * half] = torch.cat((pair, pair), dim=-1)
        assert ((out.float() - wanted.float()).abs() <= STEPS * step_of(size)).all()


@pytest.mark.triton
def test_projection_keeps_its_values(device, generator):
    inputs = make_inputs((2, 5, 2, 16, 12), device, generator)
    before = [t.clone() for t in inputs]
    with backend("triton"):
        qkv_norm_rope(*inputs, EPS)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types_take_the_reference(dtype, device, generator):
    inputs = [t.to(dtype) for t in make_inputs((2, 5, 2, 16, 12), device, generator)]
    out = qkv_norm_rope(*inputs, EPS)
    assert all(t.dtype == dtype for t in out)
    assert all(map(torch.equal, out, qkv_norm_rope_ref(*inputs, EPS)))


def test_pairs_the_two_halves_and_leaves_the_rest():
    qkv, cos, sin = (t.double() for t in make_inputs((2, 5, 3, 16, 12), torch.device("cpu"), None))
    q, k, _ = qkv_norm_rope(qkv.float(), cos.float(), sin.float(), EPS)
    for part, out in ((0, q), (1, k)):
        x = qkv[..., part, :]
        n = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
        c, s = cos[:, None, 2], sin[:, None, 2]
        torch.testing.assert_close(out[..., 12:].double(), n[..., 12:], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(out[..., 2].double(), n[..., 2] * c - n[..., 8] * s, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(out[..., 8].double(), n[..., 8] * c + n[..., 2] * s, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.triton
def test_addresses_pass_2_to_the_31(device, generator):
    qkv = torch.zeros(196, 1797, 32, 3, 64, device=device, dtype=torch.float16)  # 2.16e9 elements, 4.3 GB
    last, cos, sin = make_inputs((1, 1797, 32, 64, 48), device, generator)
    qkv[-1:] = last = (4 * last).round().clamp(-16, 16)
    with backend("triton"):
        out = qkv_norm_rope(qkv, cos, sin, EPS)
    for got, wanted in zip(out, qkv_norm_rope_ref(last, cos, sin, EPS), strict=True):
        assert torch.equal(got[-1:], wanted)
