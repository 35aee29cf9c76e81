"""Rows, positions and noise of a packed sequence, at the published numbers."""

import pytest
import torch

from comfyui_h3.h3core.request import resolve
from comfyui_h3.h3core.sampling.noise import Noise
from comfyui_h3.h3core.sampling.packing import (
    audio_from_rows,
    audio_to_rows,
    pack,
    video_from_rows,
    video_to_rows,
)
from comfyui_h3.h3core.sampling.positions import spatial_axes
from comfyui_h3.h3core.types import Request


def packed(num_text, **fields):
    return pack(resolve(Request(prompt="x", **fields))[0], torch.ones(num_text, dtype=torch.int32))


@pytest.mark.parametrize(
    ("num_text", "fields", "rows"),
    [
        (537, {"num_frames": 243}, 73_923),  # the release's own text-to-video example
        (66, {"num_frames": 124}, 37_776),
        (662, {"num_frames": 192}, 58_758),
        (0, {"num_frames": 362}, 109_062),
        (537, {"width": 768, "height": 448, "num_frames": 124}, 13_383),
    ],
)
def test_row_counts_are_the_published_ones(num_text, fields, rows):
    assert packed(num_text, **fields).layout.num_rows == rows


def test_spans_are_text_audio_video():
    layout = packed(66).layout
    assert (layout.audio, layout.video) == (slice(66, 66 + 414), slice(480, 37_776))


def test_spatial_axes_of_the_default_canvas():
    h, w = spatial_axes(48, 84)
    assert (len(h), len(w)) == (24, 42)
    assert h[0] == pytest.approx(3.9051368637047297, abs=1e-12)
    assert h[-1] == pytest.approx(27.08695787493733, abs=1e-12)
    assert w[0] == pytest.approx(-5.166010488516722, abs=1e-12)
    assert w[-1] == pytest.approx(36.15810522715877, abs=1e-12)


def test_positions_follow_the_text():
    sequence = packed(537, num_frames=243)
    positions, layout = sequence.position_ids, sequence.layout
    assert positions.dtype == torch.float32
    assert positions[:537].tolist() == [[i, 0, 0] for i in range(537)]
    left, right = positions[layout.audio].view(2, 405, 3)
    assert left[404].tolist() == pytest.approx([537 + 404, 0, -5.166010488516722])
    assert right[0].tolist() == pytest.approx([537, 0, 36.15810522715877])
    times = positions[layout.video].view(72, 24, 42, 3)[:7, 0, 0, 0]
    assert times.tolist() == pytest.approx([537, 538.6667, 545.3333, 552, 558.6667, 565.3333, 567], abs=1e-3)


def test_text_follows_the_clock_of_the_video():
    timesteps, index = packed(5, width=64, height=64, num_frames=22).timestep_rows(torch.tensor(0.2), torch.tensor(0.5))
    assert timesteps.tolist() == pytest.approx([0.2, 0.5])
    assert set(index[:5].tolist()) == {0}
    assert set(index[5 : 5 + 74].tolist()) == {1}
    assert set(index[79:].tolist()) == {0}


def test_equal_timesteps_are_one_entry():
    timesteps, index = packed(5).timestep_rows(torch.tensor(0.0), torch.tensor(0.0))
    assert len(timesteps) == 1
    assert not index.any()


def test_row_vector_is_channel_then_patch():
    latents = torch.arange(24 * 2 * 4 * 6).view(24, 2, 4, 6).float()
    row = video_to_rows(latents)[1 * 6 + 1 * 3 + 2].view(24, 2, 2)  # frame 1, patch (1, 2)
    assert torch.equal(row, latents[:, 1, 2:4, 4:6])


def test_audio_rows_are_channel_major():
    latents = torch.randn(2, 32, 9)
    assert torch.equal(audio_to_rows(latents)[9 + 3], latents[1, :, 3])


def test_rows_go_back_to_latents():
    video, audio = torch.randn(24, 7, 8, 6), torch.randn(2, 32, 37)
    assert torch.equal(video_from_rows(video_to_rows(video), 7, 8, 6), video)
    assert torch.equal(audio_from_rows(audio_to_rows(audio)), audio)


def test_noise_has_one_generator_per_stream_with_the_same_seed():
    request, _ = resolve(Request(prompt="x", width=96, height=64, num_frames=22))
    noise = Noise.draw(request, 7, video_channels=24, audio_channels=32)
    assert torch.equal(noise.video[None], torch.randn(1, 24, 7, 4, 6, generator=torch.Generator().manual_seed(7)))
    rows = torch.randn(74, 32, generator=torch.Generator().manual_seed(7))
    assert torch.equal(audio_to_rows(noise.audio), rows)


@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**63 - 1])
def test_every_legal_seed_draws(seed):
    request, _ = resolve(Request(prompt="x", width=32, height=32, num_frames=5))
    noise = Noise.draw(request, seed, video_channels=24, audio_channels=32)
    assert torch.isfinite(noise.video).all()
