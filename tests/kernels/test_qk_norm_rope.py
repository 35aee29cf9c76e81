import pytest
import torch

from comfyui_h3.kernels.dispatch import backend
from comfyui_h3.kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_ref
from comfyui_h3.tests.tolerances import NORM_DIFFERENT_SHARE, NORM_THEN_PRODUCTS_ULPS, NORM_ULPS, ulp_of, ulps_apart

EPS = 1e-5


def make_inputs(num_rows, num_heads, head_dim, rotary_dim, device, generator):
    """q and k are views of one packed (S, 3 * N * H) projection, as in the model."""
    qkv = (2 * torch.randn(num_rows, 3 * num_heads * head_dim, device=device, generator=generator)).bfloat16()
    q, k, _ = qkv.view(num_rows, 3, num_heads, head_dim).unbind(1)
    q_weight, k_weight = (1 + 0.2 * torch.randn(2, head_dim, device=device, generator=generator)).bfloat16()
    angle = 100 * torch.randn(num_rows, rotary_dim // 2, device=device, generator=generator)
    return q, k, q_weight, k_weight, angle.cos().bfloat16(), angle.sin().bfloat16()


def integers(x):
    """Small integers, in the memory of ``x``: their squares add up exactly, in every order."""
    return x.copy_((4 * x).round().clamp(-16, 16))


def check_close(out, x, weight, cos, sin):
    """A rotated channel in steps of the larger channel of its pair, as the two products may cancel."""
    expected, _ = qk_norm_rope_ref(x, x, weight, weight, cos, sin, EPS)
    half = cos.shape[-1]
    size = torch.nn.functional.rms_norm(x, weight.shape, weight, EPS).abs()
    pair = torch.maximum(size[..., :half], size[..., half : 2 * half])
    size[..., : 2 * half] = torch.cat((pair, pair), dim=-1)
    assert out.isfinite().all()
    assert (out != expected).float().mean() <= NORM_DIFFERENT_SHARE
    assert ((out.float() - expected.float()).abs() <= NORM_THEN_PRODUCTS_ULPS * ulp_of(size)).all()


SHAPES = [
    (1, 1, 2, 2),
    (5, 3, 48, 24),
    (11, 5, 40, 0),  # the norm alone
    (33, 4, 32, 24),  # the tiny model
    (7, 9, 64, 64),  # every channel rotates
    (6, 56, 128, 96),  # H3
]


@pytest.mark.triton
@pytest.mark.parametrize("shape", [(0, 4, 32, 24), *SHAPES])
def test_is_bit_identical_where_the_squares_add_up_exactly(shape, device, generator):
    q, k, *rest = make_inputs(*shape, device, generator)
    q, k = integers(q), integers(k)
    reference = qk_norm_rope_ref(q, k, *rest, EPS)
    with backend("triton"):
        out = qk_norm_rope(q, k, *rest, EPS)
    for got, expected in zip(out, reference, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.triton
@pytest.mark.parametrize("shape", SHAPES)
def test_is_close_to_reference(shape, device, generator):
    q, k, q_weight, k_weight, cos, sin = make_inputs(*shape, device, generator)
    with backend("triton"):
        q_out, k_out = qk_norm_rope(q.clone(), k.clone(), q_weight, k_weight, cos, sin, EPS)
    check_close(q_out, q, q_weight, cos, sin)
    check_close(k_out, k, k_weight, cos, sin)


@pytest.mark.triton
def test_norm_alone_is_within_one_step_of_reference(device, generator):
    q, k, q_weight, k_weight, cos, sin = make_inputs(20, 56, 128, 96, device, generator)
    with backend("triton"):
        out, _ = qk_norm_rope(q.clone(), k, q_weight, k_weight, torch.ones_like(cos), torch.zeros_like(sin), EPS)
    apart = ulps_apart(out, torch.nn.functional.rms_norm(q, q_weight.shape, q_weight, EPS))
    assert apart.max() <= NORM_ULPS
    assert (apart > 0).float().mean() <= NORM_DIFFERENT_SHARE


@pytest.mark.triton
def test_values_beside_q_and_k_stay_as_they_are(device, generator):
    qkv = torch.randn(5, 3, 4, 32, device=device, generator=generator).bfloat16()
    v = qkv[:, 2].clone()
    with backend("triton"):
        qk_norm_rope(qkv[:, 0], qkv[:, 1], *make_inputs(5, 4, 32, 24, device, generator)[2:], EPS)
    assert torch.equal(qkv[:, 2], v)


@pytest.mark.triton
def test_reads_strided_cos_and_sin(device, generator):
    q, k, q_weight, k_weight, cos, sin = make_inputs(5, 4, 32, 24, device, generator)
    table = torch.cat((cos, sin), dim=-1)
    reference = qk_norm_rope_ref(integers(q), integers(k), q_weight, k_weight, cos, sin, EPS)
    with backend("triton"):
        out = qk_norm_rope(q, k, q_weight, k_weight, table[:, :12], table[:, 12:], EPS)
    for got, expected in zip(out, reference, strict=True):
        assert torch.equal(got, expected)


def test_fp32_is_a_rotation_of_split_halves(device, generator):
    q, k, q_weight, k_weight, cos, sin = (t.float() for t in make_inputs(6, 3, 32, 24, device, generator))
    angle = torch.atan2(sin, cos).double()
    q_out, k_out = qk_norm_rope(q, k, q_weight, k_weight, angle.cos().float(), angle.sin().float(), EPS)
    for x, weight, out in ((q, q_weight, q_out), (k, k_weight, k_out)):
        n = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS) * weight
        turned = torch.complex(n[..., :12], n[..., 12:24]) * torch.polar(torch.ones_like(angle), angle)[:, None]
        expected = torch.cat((turned.real, turned.imag, n[..., 24:]), dim=-1).float()
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=2e-6)  # fp32 has 24 significant bits


@pytest.mark.gpu
@pytest.mark.triton
def test_addresses_pass_2_to_the_31(device, generator):
    qkv = torch.zeros(100_352, 3, 56, 128, device=device, dtype=torch.bfloat16)  # 2.16e9 elements, 4.3 GB
    q, k, _ = qkv.unbind(1)
    last, eighth = slice(100_352 - 64, 100_352), slice(100_352 * 7 // 8, 100_352)
    q[last], k[last], q_weight, k_weight, _, _ = make_inputs(64, 56, 128, 96, device, generator)
    angle = 100 * torch.randn(100_352, 48, device=device, generator=generator)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    q_last, k_last = q[last].clone(), k[last].clone()
    with backend("triton"):
        shard = qk_norm_rope(q[eighth].clone(), k[eighth].clone(), q_weight, k_weight, cos[eighth], sin[eighth], EPS)
        q_out, k_out = qk_norm_rope(q, k, q_weight, k_weight, cos, sin, EPS)
    check_close(q_out[last], q_last, q_weight, cos[last], sin[last])
    check_close(k_out[last], k_last, k_weight, cos[last], sin[last])
    assert torch.equal(q_out[eighth], shard[0])
    assert torch.equal(k_out[eighth], shard[1])
