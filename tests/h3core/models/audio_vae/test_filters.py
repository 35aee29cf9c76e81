"""The alias-free activation: its filter, and the closed form of its module."""

import math

import pytest
import torch

from comfyui_h3.h3core.models.audio_vae.filters import AliasFreeSnakeBeta, kaiser_sinc_filter

TAPS = [0.0020289647, 0.0093894657, -0.0255434588, -0.0576573834, 0.1285725832, 0.4432097971]


def test_the_filter_is_that_of_the_release():
    taps = kaiser_sinc_filter()
    assert taps.shape == (1, 1, 12)
    assert torch.equal(taps, taps.flip(-1))
    torch.testing.assert_close(taps[0, 0, :6], torch.tensor(TAPS), rtol=0, atol=1e-9)
    assert taps.sum().item() == pytest.approx(1, abs=1e-6)


def closed_form(x, f, alpha, beta):
    n = len(x)
    u = []
    for t in range(n):
        u.append(2 * sum(x[min(max(t + j, 0), n - 1)] * f[5 - 2 * j] for j in range(-3, 3)))
        u.append(2 * sum(x[min(max(t + j, 0), n - 1)] * f[6 - 2 * j] for j in range(-2, 4)))
    v = [s + torch.sin(alpha.exp() * s) ** 2 / (beta.exp() + 1e-9) for s in u]
    return [sum(f[k] * v[min(max(2 * t + k - 5, 0), 2 * n - 1)] for k in range(12)) for t in range(n)]


@pytest.mark.parametrize("length", [1, 2, 3, 11])
def test_the_module_equals_its_closed_form(length):
    generator = torch.Generator().manual_seed(length)
    module = AliasFreeSnakeBeta(3).double()
    with torch.no_grad():
        module.act.alpha.copy_(torch.randn(3, generator=generator))
        module.act.beta.copy_(torch.randn(3, generator=generator))
        x = torch.randn(2, 3, length, generator=generator, dtype=torch.float64)
        out = module(x)
        f = module.upsample.filter.flatten()
        assert out.shape == x.shape
        for c in range(3):
            wanted = torch.stack(closed_form(x[1, c], f, module.act.alpha[c], module.act.beta[c]))
            torch.testing.assert_close(out[1, c], wanted, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("alpha", "beta"), [(0.0, 0.0), (0.5, -1.0), (0.0, 20.0)])
def test_a_constant_passes_as_through_the_plain_activation_whose_parameters_are_logarithms(alpha, beta):
    module = AliasFreeSnakeBeta(1)
    with torch.no_grad():
        module.act.alpha.fill_(alpha)
        module.act.beta.fill_(beta)
        out = module(torch.full((1, 1, 9), 0.7))
    wanted = 0.7 + math.sin(math.exp(alpha) * 0.7) ** 2 / math.exp(beta)
    torch.testing.assert_close(out, torch.full_like(out, wanted), rtol=0, atol=1e-6)


def test_taps_are_read_from_the_checkpoint():
    module = AliasFreeSnakeBeta(1)
    zeros = torch.zeros(1, 1, 12)
    module.load_state_dict({"upsample.filter": zeros, "downsample.lowpass.filter": zeros}, strict=False)
    with torch.no_grad():
        assert (module(torch.ones(1, 1, 4)) == 0).all()
