"""Weights stored as length and direction: names, values, folding."""

import copy

import pytest
import torch

from comfyui_h3.h3core.models.audio_vae.weight_norm import (
    WeightNormConv1d,
    WeightNormConvTranspose1d,
    fold_weight_norm,
)

MODULES = [lambda: WeightNormConv1d(3, 4, 5, padding=4, dilation=2), lambda: WeightNormConvTranspose1d(6, 4, 9, 5)]


@pytest.mark.parametrize("make", MODULES)
def test_a_weight_is_its_length_times_its_direction_over_all_but_the_first_dim(make):
    module = make().double()
    lengths, direction = module.parametrizations["weight"].original0, module.parametrizations["weight"].original1
    with torch.no_grad():
        lengths.copy_(torch.rand_like(lengths) + 0.5)
        direction.copy_(torch.randn_like(direction))
        wanted = lengths * direction / direction.flatten(1).norm(dim=1)[:, None, None]
        fold_weight_norm(module)
    assert lengths.shape == (direction.shape[0], 1, 1)
    torch.testing.assert_close(module.weight, wanted)


@pytest.mark.parametrize("make", MODULES)
def test_folding_changes_names_and_no_bit_of_the_output(make):
    module = make()
    assert set(module.state_dict()) == {
        "bias",
        "parametrizations.weight.original0",
        "parametrizations.weight.original1",
    }
    x = torch.randn(2, module.in_channels, 7)
    folded = copy.deepcopy(module)
    with torch.no_grad():
        wanted = module(x)
        fold_weight_norm(folded)
        fold_weight_norm(folded)  # once folded it stays so
        assert torch.equal(folded(x), wanted)
        assert torch.equal(module(x), wanted)  # the original of the copy still works
    assert set(folded.state_dict()) == {"bias", "weight"}


@pytest.mark.parametrize("make", MODULES)
def test_folding_on_meta_gives_the_names_of_a_folded_checkpoint(make):
    with torch.device("meta"):
        module = make()
    fold_weight_norm(module)
    plain = make()
    fold_weight_norm(plain)
    module.load_state_dict(plain.state_dict(), assign=True)
    x = torch.randn(1, plain.in_channels, 4)
    with torch.no_grad():
        assert torch.equal(module(x), plain(x))
