"""The order of fused qkv rows, told from the size of their blocks, and left open where these do not tell."""

import pytest
import torch
from safetensors.torch import save_file

from comfyui_h3.h3core.checkpoint.index import read_header
from comfyui_h3.h3core.checkpoint.qkv_order import block_rms, judge
from comfyui_h3.h3core.errors import CheckpointError

HEADS, DIM = 56, 128


def sizes(ratio, seed, spread=0.15, num_layers=3):
    """(L, heads, 3): sizes of q, k and v of each head, spread around 1; v is ``ratio`` times as large."""
    generator = torch.Generator().manual_seed(seed)
    rms = (torch.randn(num_layers, HEADS, 3, generator=generator) * spread).exp()
    rms[..., 2] *= ratio
    return rms


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ratio", [0.5, 0.8, 1.3, 2.0])
def test_order_is_told_from_the_size_of_one_part(ratio, seed):
    rms = sizes(ratio, seed)
    assert judge(rms.flatten(1)).order == "interleaved"
    assert judge(rms.transpose(1, 2).flatten(1)).order == "stacked"


@pytest.mark.parametrize("seed", range(50))
def test_parts_of_one_size_tell_nothing(seed):
    assert judge(sizes(1.0, seed).flatten(1)).order is None


def test_both_patterns_at_once_tell_nothing():
    rms = torch.ones(1, 3 * HEADS)
    rms[:, ::3] *= 2
    rms[:, :HEADS] *= 2
    assert judge(rms).order is None


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_constant_weights_tell_nothing(value):
    found = judge(torch.full((3, 3 * HEADS), value))
    assert (found.order, found.by_period, found.by_thirds) == (None, 0.0, 0.0)


def test_shares_are_those_of_the_definition():
    """Two levels of blocks: all variance lies between thirds; of a period's means, counted by hand."""
    rms = torch.tensor([[1.0] * 2 + [1.0] * 2 + [torch.e] * 2])  # logs 0 0 0 0 1 1
    found = judge(rms)
    assert found.by_thirds == pytest.approx(1.0)
    assert found.by_period == pytest.approx(0.25)  # logs by i % 3: (0, 0), (0, 1), (0, 1) around 1/3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_are_measured_by_a_sample_of_their_rows(tmp_path, dtype):
    rms = sizes(1.5, 0)[0].flatten()  # of 168 blocks
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(3 * HEADS, DIM, 64, generator=generator) * rms[:, None, None]
    save_file({"w": weight.flatten(0, 1).to(dtype)}, tmp_path / "w.safetensors")
    entry = read_header(tmp_path / "w.safetensors")["w"]
    found = block_rms("w", entry, HEADS, DIM)
    assert found.shape == (3 * HEADS,)
    # 16 rows of 64 values: the RMS of 1,024 normal numbers lies within 1 / sqrt(2 * 1024) = 2.2 %, here to 5 sigma.
    assert torch.allclose(found, rms, rtol=0.11)
    with pytest.raises(CheckpointError, match="wants 21120 rows"):
        block_rms("w", entry, 55, DIM)
