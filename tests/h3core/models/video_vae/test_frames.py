"""Decoding to 8-bit frames on the host: the same values as the floats, checked, cancelled, and with the kernels."""

import copy
import math

import pytest
import torch

from comfyui_h3.h3core.errors import OutputError
from comfyui_h3.h3core.media.frames import to_uint8
from comfyui_h3.h3core.models.video_vae.decoder import (
    TILE_BATCH,
    VideoDecoder,
    decode,
    decode_frames,
    usual_tile_batch,
)
from comfyui_h3.kernels.dispatch import backend
from comfyui_h3.tests.oracle.vae_oracle import randomize, tiny_video_config

# The kernels round at the same points as PyTorch and add up in another order, so that a few halves fall to the other
# side of a rounding boundary: less than half precision itself moves a pixel (at most 4e-3, 5e-4 on average, of fp32 at
# the released size).
KERNELS_APART, KERNELS_APART_ON_AVERAGE = 4e-3, 5e-4


@pytest.fixture(scope="module")
def decoder(device):
    """2 x 2 latents a tile, so that a few latents are several tiles. In half on a GPU, as it is used there."""
    model = VideoDecoder(tiny_video_config(tile_size=32, tile_overlap=16))
    randomize(model, 0)
    return model.to_compute_dtype(torch.float16).cuda() if device.type == "cuda" else model


def latents(num_tokens, height=3, width=4, seed=0):
    return torch.randn(24, num_tokens, height, width, generator=torch.Generator().manual_seed(seed))


def frames(decoder, z, **kwargs):
    return torch.cat([part.clone() for part in decode_frames(decoder, z, **kwargs)])


@pytest.mark.parametrize(("num_tokens", "tile_batch"), [(1, None), (2, 3), (9, 4), (12, 100), (22, 7)])
def test_frames_are_the_floats_rounded(decoder, num_tokens, tile_batch):
    z = latents(num_tokens)
    floats = torch.cat(list(decode(decoder, z, tile_batch=tile_batch)), dim=1)
    ours = frames(decoder, z, tile_batch=tile_batch)
    assert ours.device.type == "cpu"
    assert ours.float().std() > 20
    assert torch.equal(ours, to_uint8(floats).movedim(0, -1).cpu())


def test_parts_are_those_of_the_floats(decoder):
    z = latents(12)
    assert [len(part) for part in decode_frames(decoder, z)] == [17, 17, 5]
    assert all(part.is_contiguous() and part.shape[1:] == (48, 64, 3) for part in decode_frames(decoder, z))


def test_a_part_stays_until_the_next_is_asked_for(decoder):
    z = latents(22)
    wanted = frames(decoder, z).split([17, 17, 17, 17, 5])
    for part, expected in zip(decode_frames(decoder, z), wanted, strict=True):
        if part.device.type == "cpu" and torch.cuda.is_available():
            torch.cuda.synchronize()  # whatever is on its way arrives
        assert torch.equal(part, expected)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("token", "chunk"), [(1, 1), (9, 2)])
def test_no_part_is_given_out_that_is_not_finite(decoder, value, token, chunk):
    z = latents(12)
    z[3, token, 1, 2] = value
    parts = decode_frames(decoder, z)
    for _ in range(chunk - 1):
        assert len(next(parts)) == 17
    with pytest.raises(OutputError, match=f"chunk {chunk} of 2"):
        next(parts)
    assert list(parts) == []


class Cancelled(BaseException):
    """As a host's interrupt: not an Exception."""


@pytest.mark.parametrize("at", [0, 4, 8, 16, 24])
def test_cancelling_at_any_tile_leaves_nothing_behind(decoder, at):
    z = latents(22)
    wanted = frames(decoder, z)

    def cancel(done, total):
        if done == at:
            raise Cancelled

    with pytest.raises(Cancelled):
        frames(decoder, z, tile_batch=4, on_tile=cancel)
    assert torch.equal(frames(decoder, z), wanted)


def test_progress_counts_the_tiles_of_all_chunks_from_zero(decoder):
    calls = []
    frames(decoder, latents(12), tile_batch=4, on_tile=lambda done, total: calls.append((done, total)))
    assert calls == [(done, 12) for done in (0, 4, 8, 12)]


@pytest.mark.triton
def test_kernels_change_nothing_but_the_order_of_sums(decoder, device):
    half = copy.deepcopy(decoder).to_compute_dtype(torch.float16)
    z = torch.randn(1, 24, 7, 2, 2, generator=torch.Generator().manual_seed(1)).to(device)
    with torch.no_grad():
        with backend("triton"):
            fused = half(z)
        with backend("torch"):
            eager = half(z)
    apart = (fused - eager).abs() / eager.std()
    assert apart.max() <= KERNELS_APART
    assert apart.mean() <= KERNELS_APART_ON_AVERAGE
    assert fused.isfinite().all()


@pytest.mark.gpu
def test_a_gpu_decodes_as_the_cpu_does(decoder):
    z = latents(12)
    cpu = copy.deepcopy(decoder).cpu().to_compute_dtype(torch.float32)
    difference = frames(decoder, z).int() - frames(cpu, z).int()
    assert difference.abs().max() <= 2  # half products on the GPU
    assert (difference != 0).float().mean() < 0.2


@pytest.mark.gpu
def test_batches_of_tiles_are_the_same_frames_on_a_gpu(decoder):
    z = latents(12, height=4, width=5)
    difference = frames(decoder, z, tile_batch=1).int() - frames(decoder, z, tile_batch=7).int()
    assert difference.abs().max() <= 1  # another matrix product adds up in another order


def test_a_cpu_decodes_tile_by_tile_and_a_gpu_several_at_a_time(decoder, device):
    assert usual_tile_batch(decoder, 28) == (TILE_BATCH if device.type == "cuda" else 1)
