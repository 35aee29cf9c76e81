import math

import pytest
import torch

from comfyui_h3.kernels.dispatch import backend
from comfyui_h3.kernels.normed_attention import normed_attention, normed_attention_ref

# float16 has 11 significant bits. The exponentials and the result are rounded once, each by half a step at most: with
# weights that add up to 1, two half steps of the largest value.
TOLERANCE = 2**-11 + 2**-12

SHAPES = [  # B, S, N, H
    (1, 1, 1, 16),
    (2, 33, 2, 16),  # the tiny model
    (1, 64, 3, 32),  # whole blocks of keys only
    (1, 133, 2, 64),  # whole blocks and a rest
]


def make_inputs(shape, device, generator):
    """Normed q and k, as views of one interleaved projection."""
    num_tiles, num_rows, num_heads, head_dim = shape
    qkv = torch.randn(num_tiles, num_rows, num_heads, 3, head_dim, device=device, generator=generator)
    qkv[..., :2, :] = torch.nn.functional.rms_norm(qkv[..., :2, :], (head_dim,))
    return qkv.half().unbind(-2)


def exact(q, k, v):
    """In float64, a head after the other."""
    logits = torch.einsum("bsnh,btnh->bnst", q.double(), k.double()) / q.shape[-1] ** 0.5
    return torch.einsum("bnst,btnh->bsnh", logits.softmax(-1), v.double())


@pytest.mark.triton
@pytest.mark.parametrize("shape", SHAPES)
def test_is_softmax_attention(shape, device, generator):
    q, k, v = make_inputs(shape, device, generator)
    with backend("triton"):
        out = normed_attention(q, k, v)
    assert out.shape == shape
    assert out.is_contiguous()
    assert (out.double() - exact(q, k, v)).abs().max() <= TOLERANCE * v.abs().max()


@pytest.mark.triton
def test_holds_the_largest_and_the_smallest_logits(device):
    # All keys along one direction, half of them against it: logits of +8 and -8.
    q = torch.ones(1, 70, 1, 64, device=device, dtype=torch.float16)
    k = q.clone()
    k[:, ::2] = -1
    v = torch.zeros_like(q)
    v[:, ::2] = 1
    with backend("triton"):
        same = normed_attention(q, q, v)
        apart = normed_attention(q, k, v)
    torch.testing.assert_close(same, torch.full_like(q, 0.5), rtol=2**-10, atol=0)
    torch.testing.assert_close(apart, torch.full_like(q, 1 / (1 + math.exp(16))), rtol=0, atol=2**-24)


@pytest.mark.triton
def test_heads_and_tiles_do_not_mix(device, generator):
    q, k, v = make_inputs((2, 40, 3, 16), device, generator)
    with backend("triton"):
        whole = normed_attention(q, k, v)
        part = normed_attention(q[1:, :, 1:2], k[1:, :, 1:2], v[1:, :, 1:2])
    assert torch.equal(whole[1:, :, 1:2], part)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types_take_the_reference(dtype, device, generator):
    q, k, v = (t.to(dtype) for t in make_inputs((2, 33, 2, 16), device, generator))
    assert torch.equal(normed_attention(q, k, v), normed_attention_ref(q, k, v))


def test_reference_is_softmax_attention():
    q, k, v = (t.float() for t in make_inputs((2, 33, 2, 24), torch.device("cpu"), torch.Generator().manual_seed(0)))
    torch.testing.assert_close(normed_attention_ref(q, k, v).double(), exact(q, k, v), rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.triton
def test_at_the_released_size(device, generator):
    q, k, v = make_inputs((2, 1797, 32, 64), device, generator)
    with backend("triton"):
        out = normed_attention(q, k, v)
    for tile in range(2):
        part = slice(tile, tile + 1)
        assert (out[part].double() - exact(q[part], k[part], v[part])).abs().max() <= TOLERANCE * v.abs().max()
