import pytest
import torch

from comfyui_h3.h3core.request import resolve
from comfyui_h3.h3core.sampling.packing import pack
from comfyui_h3.h3core.sampling.schedule import Schedule
from comfyui_h3.h3core.sampling.steps import Steps
from comfyui_h3.h3core.types import Condition, Request

SCHEDULE = Schedule.uniform(50, 12.0, 3.0)


def sequence(conditions=()):
    request, _ = resolve(Request(prompt="x", width=64, height=64, num_frames=22))
    return pack(request, torch.ones(5, dtype=torch.int32), conditions)


def keyframe():
    return Condition(kind="keyframe", video=torch.zeros(24, 1, 4, 4), audio=None, frame=0)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("conditions", [(), (keyframe(),)], ids=["text", "keyframe"])
def test_every_row_has_the_timestep_of_its_step(exact, conditions):
    packed = sequence(conditions)
    steps = Steps.of(packed, SCHEDULE, exact=exact)
    timesteps = torch.cat(steps.groups)
    assert steps.num_timesteps == len(timesteps)
    assert len(steps.places) == len(steps.rows) == 49
    for step, (place, rows) in enumerate(zip(steps.places, steps.rows, strict=True)):
        visited, index = packed.timestep_rows(1 - SCHEDULE.video[step], 1 - SCHEDULE.audio[step])
        assert torch.equal(timesteps[place][rows], visited[index.long()])


def test_exact_groups_are_the_timesteps_of_one_step_each():
    steps = Steps.of(sequence(), SCHEDULE, exact=True)
    assert [len(group) for group in steps.groups] == [1] + [2] * 48


def test_a_condition_of_every_step_is_projected_once():
    alone = Steps.of(sequence(), SCHEDULE, exact=False)
    conditioned = Steps.of(sequence([keyframe()]), SCHEDULE, exact=False)
    assert len(alone.groups) == len(conditioned.groups) == 1
    assert conditioned.num_timesteps == alone.num_timesteps + 1
    assert len(torch.unique(conditioned.groups[0])) == conditioned.num_timesteps


def test_steps_share_their_rows():
    """One row of indices a forward would be hundreds of megabytes for a long clip with many points."""
    steps = Steps.of(sequence(), SCHEDULE, exact=False)
    assert len({id(rows) for rows in steps.rows}) == 2  # the first step, where both clocks are at 0, and the others
