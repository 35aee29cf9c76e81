"""Sigma grids at their published values, and what a step does."""

import pytest
import torch

from comfyui_h3.h3core.sampling.schedule import Schedule, euler_step

VIDEO = {
    0: 1.0,
    1: 0.998266876,
    3: 0.994594634,
    10: 0.979079425,
    25: 0.920127749,
    46: 0.439024389,
    48: 0.200000003,
    49: 0.0,
}
AUDIO = {
    0: 1.0,
    1: 0.993103445,
    3: 0.978723407,
    10: 0.921259761,
    25: 0.742268026,
    46: 0.163636371,
    48: 0.0588235296,
    49: 0.0,
}


@pytest.mark.parametrize(("stream", "values"), [("video", VIDEO), ("audio", AUDIO)])
def test_fifty_points_are_the_published_ones(stream, values):
    sigmas = getattr(Schedule.uniform(50, 12.0, 3.0), stream)
    assert len(sigmas) == 50
    for index, value in values.items():
        assert float(sigmas[index]) == pytest.approx(value, abs=1e-9)


def test_fifty_points_are_forty_nine_forwards():
    assert Schedule.uniform(50, 12.0, 3.0).num_forwards == 49
    assert Schedule.uniform(2, 12.0, 3.0).num_forwards == 1


@pytest.mark.parametrize("points", [2, 3, 50, 200, 1000])
def test_both_streams_have_the_same_number_of_forwards(points):
    schedule = Schedule.uniform(points, 12.0, 3.0)
    assert len(schedule.video) == len(schedule.audio) == points


def test_audio_is_cleaner_than_video_in_every_step():
    schedule = Schedule.uniform(50, 12.0, 3.0)
    assert (schedule.audio[1:-1] < schedule.video[1:-1]).all()


def test_each_stream_keeps_its_own_noise_level_without_velocity():
    """One clock for both would over-noise the sound about threefold late in the run."""
    schedule = Schedule.uniform(50, 12.0, 3.0)
    for sigmas in (schedule.video, schedule.audio):
        x = torch.ones(1)
        for step in range(schedule.num_forwards):
            x = euler_step(x, torch.zeros(1), sigmas, step)
        assert torch.equal(x, torch.ones(1))


def test_the_true_velocity_leads_to_the_data():
    """x_t = (1 - sigma) * data + sigma * noise has the velocity data - noise."""
    g = torch.Generator().manual_seed(0)
    data, noise = torch.randn(2, 100, generator=g)
    sigmas = Schedule.uniform(50, 12.0, 3.0).video
    x = noise
    for step in range(49):
        x = euler_step(x, data - noise, sigmas, step)
    torch.testing.assert_close(x, data, atol=1e-5, rtol=0)
