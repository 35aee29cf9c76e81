"""Condition rows of keyframes and references against diffusers: packing, timesteps, noise, forward."""

import math

import pytest
import torch

from comfyui_h3.h3core.checkpoint.official import Checkpoint
from comfyui_h3.h3core.request import resolve_size
from comfyui_h3.h3core.sampling.noise import Noise, noised
from comfyui_h3.h3core.sampling.packing import layout_of, pack, video_to_rows
from comfyui_h3.h3core.sampling.schedule import Schedule
from comfyui_h3.h3core.types import Condition
from comfyui_h3.tests.oracle.pipeline_oracle import diffusers_folder, transformer

pytestmark = pytest.mark.oracle

SIZES = [(96, 64, 22), (1344, 768, 124), (768, 448, 243), (512, 2016, 362)]


def resolved(width, height, num_frames, task="fl2va"):
    return resolve_size(width, height, num_frames, None, task)[0]


def modality(num_text):
    tags = torch.ones(num_text, dtype=torch.int32)
    tags[2:4] = 0
    return tags


def keyframe(request, frame):
    return Condition(
        kind="keyframe", video=torch.zeros(24, 1, request.latent_height, request.latent_width), frame=frame
    )


def reference(kind, frames=1, height=4, width=6, num_audio=0):
    return Condition(
        kind=kind,
        video=None if kind == "audio" else torch.zeros(24, frames, height, width),
        audio=torch.zeros(2, 32, num_audio) if num_audio else None,
    )


MIXED = [
    reference("image", 1, 4, 6),
    reference("audio", num_audio=3),
    reference("video", 7, 4, 4, num_audio=4),
    reference("video", 17, 10, 6, num_audio=200),  # its sound is longer than its picture
    reference("video", 37, 6, 10),
    reference("image", 1, 12, 4),
]


def their_references(conditions):
    """References of diffusers: only their kinds are read, the sizes come from the latents."""
    from diffusers.modular_pipelines.minimax_h3 import references as classes

    made = []
    for condition in conditions:
        sound = None if condition.audio is None else torch.zeros(2, 1)
        if condition.kind == "image":
            made.append(classes.MiniMaxH3ImageReference(image=None))
        elif condition.kind == "audio":
            made.append(classes.MiniMaxH3AudioReference(audio=sound))
        else:
            made.append(classes.MiniMaxH3VideoReference(frames=None, audio=sound))
    return made


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("anchors", [("first",), ("last",), ("first", "last")])
def test_keyframes_are_packed_as_diffusers_packs_them(size, anchors):
    from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep

    request = resolved(*size)
    places = {"first": 0, "last": request.num_frames - 1}
    tags = modality(9)
    sequence = pack(request, tags, [keyframe(request, places[anchor]) for anchor in anchors])
    theirs = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        tags.long(),
        request.num_latent_frames,
        request.latent_height,
        request.latent_width,
        request.num_audio_latents,
        (1, 2, 2),
        2,
        2,
        0,
        anchors,
    )
    assert torch.equal(sequence.position_ids, theirs[0].float())
    assert torch.equal(sequence.modality.long(), theirs[1])
    assert sequence.layout.num_condition == theirs[5]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("conditions", [MIXED[:1], MIXED[2:3], MIXED[4:5], MIXED[:2], MIXED], ids=len)
def test_references_are_packed_as_diffusers_packs_them(size, conditions):
    from diffusers.modular_pipelines.minimax_h3.before_denoise import (
        MiniMaxH3Ref2VAPrepareLayoutStep,
        MiniMaxH3SetTimestepsStep,
    )

    request = resolved(*size, task="ref2va")
    tags = modality(11)
    sequence = pack(request, tags, conditions)
    positions, their_tags, video_indices, audio_indices, text_indices, num_video, num_audio = (
        MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence(
            tags.long(),
            their_references(conditions),
            [condition.video[None] for condition in conditions if condition.video is not None],
            [torch.zeros(2 * condition.audio.shape[2], 32) for condition in conditions if condition.audio is not None],
            request.num_latent_frames,
            request.latent_height,
            request.latent_width,
            request.num_audio_latents,
            (1, 2, 2),
            2,
            2,
            0,
        )
    )
    assert torch.equal(sequence.position_ids, positions.float())
    assert torch.equal(sequence.modality.long(), their_tags)

    for video_time, audio_time in ((0.0, 0.0), (0.2, 0.45), (0.9995, 0.99975), (0.999, 0.9993)):
        times = torch.tensor(video_time), torch.tensor(audio_time)
        ours = sequence.timestep_rows(*times)
        theirs = MiniMaxH3SetTimestepsStep.build_row_timesteps(
            video_indices,
            audio_indices,
            num_video,
            num_audio,
            len(text_indices),
            float(times[0]),
            float(times[1]),
            max(float(times[0]), 0.999),
            1.0,
        )
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1].long(), theirs[1])


def test_keyframes_before_references_stand_at_the_time_of_the_video():
    """The layout of the serving reference: no other implementation has one to compare with."""
    request = resolved(96, 64, 22, task="ref2va")  # latents 7 x 4 x 6, audio 37
    conditions = [keyframe(request, 0), keyframe(request, 21), MIXED[0], MIXED[2], MIXED[1]]
    sequence = pack(request, modality(9), conditions)
    layout, positions = sequence.layout, sequence.position_ids
    assert layout == layout_of(request, 9, conditions)
    # keyframes 2 x 6 rows, image 2 x 3, soundtrack 2 x 4, clip 7 x 2 x 2, sound 2 x 3
    assert layout.num_condition == 12 + 6 + 8 + 28 + 6
    starts = list(range(9, 9 + 60))
    span = 5 / 3 * 22  # of the clip, longer than its 4 audio latents
    begin = 9 + 1 + span + 3  # text, image, clip, sound
    assert positions[starts[0], 0].item() == pytest.approx(begin, abs=1e-5)
    assert positions[starts[6], 0].item() == pytest.approx(begin + 5 / 3 * 21, abs=1e-5)
    assert positions[starts[12], 0] == 9  # the image
    assert positions[starts[18], 0] == 10  # the clip's sound begins with its picture
    assert positions[starts[26], 0] == 10
    assert positions[starts[54], 0].item() == pytest.approx(10 + span, abs=1e-5)
    assert positions[layout.audio.start, 0].item() == pytest.approx(begin, abs=1e-5)
    assert positions[layout.video.start, 0].item() == pytest.approx(begin, abs=1e-5)
    # keyframes share the grid of the video; sound alone lies at the ends of the video's w axis
    first_frame = positions[layout.video][:6, 1:]
    assert torch.equal(positions[starts[0] : starts[6], 1:], first_frame)
    assert set(positions[starts[54] :][:6, 2].tolist()) == {first_frame[0, 1].item(), first_frame[2, 1].item()}
    assert sequence.modality[9:69].tolist() == [0] * 18 + [2] * 8 + [0] * 28 + [2] * 6


@pytest.mark.parametrize("frame", [1, 5, 9, 13, 17, 18])
def test_keyframe_inside_the_video_stands_where_its_latent_frame_begins(frame):
    request = resolved(96, 64, 39)
    sequence = pack(request, modality(5), [keyframe(request, frame)])
    times = sequence.position_ids[sequence.layout.video, 0].unique()
    assert sequence.position_ids[5, 0] in times


def test_condition_noise_is_mixed_as_diffusers_mixes_it():
    from diffusers import MiniMaxH3Scheduler

    latents, noise = torch.randn(2, 24, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    theirs = MiniMaxH3Scheduler(shift=12.0).scale_noise(latents, 0.999, noise)
    assert torch.equal(noised(latents, noise), theirs)


def test_condition_noise_is_the_start_of_one_draw_for_the_whole_sequence():
    request = resolved(96, 64, 22, task="ref2va")
    conditions = [MIXED[0], MIXED[1], MIXED[2], MIXED[4]]  # three of them have a picture
    noise = Noise.draw(request, 7, video_channels=24, audio_channels=32, conditions=conditions)
    assert [tuple(drawn.shape) for drawn in noise.conditions] == [(24, 1, 4, 6), (24, 7, 4, 4), (24, 37, 6, 10)]
    for drawn, frames in zip(noise.conditions, (7 + 3, 7 + 3, 37), strict=True):
        shape = (1, 24, frames, *drawn.shape[2:])
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(7))[0]
        assert torch.equal(drawn, whole[:, : drawn.shape[1]])
    assert torch.equal(noise.video[None], torch.randn(1, 24, 7, 4, 6, generator=torch.Generator().manual_seed(7)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("times", [(0.2, 0.45), (0.0, 0.0), (0.9995, 0.99975)])
def test_forward_with_every_kind_of_row_is_bit_equal(tiny_h3, tmp_path_factory, dtype, times):
    request = resolved(96, 64, 22, task="ref2va")
    conditions = [keyframe(request, 0), keyframe(request, 21), *MIXED[:3]]
    sequence = pack(request, modality(9), conditions)
    layout = sequence.layout
    g = torch.Generator().manual_seed(0)
    text = torch.randn(layout.num_text, 128, generator=g).to(dtype)
    rows = torch.arange(layout.num_rows)
    video_indices, audio_indices = rows[sequence.modality == 0], rows[sequence.modality == 2]
    video_indices = video_indices[video_indices >= layout.num_text]
    video, audio = torch.randn(len(video_indices), 96, generator=g), torch.randn(len(audio_indices), 32, generator=g)
    timesteps, index = sequence.timestep_rows(*torch.tensor(times))

    checkpoint = Checkpoint.open(tiny_h3, "fl2va")
    dit = checkpoint.load_dit(torch.device("cpu"), dtype)
    oracle = transformer(diffusers_folder(tmp_path_factory.getbasetemp()), dtype)
    with torch.no_grad():
        cos, sin = dit.rope(sequence.position_ids, dtype)
        modulation = checkpoint.read_modulation([timesteps], torch.device("cpu"), dtype)
        embedded = torch.empty(layout.num_rows, dit.config.hidden_size, dtype=dtype)
        embedded[video_indices], embedded[audio_indices] = dit.embed_video(video), dit.embed_audio(audio)
        prefix = torch.cat([dit.embed_text(text), embedded[layout.condition]])
        ours_audio, ours_video = dit(
            prefix,
            audio[-layout.num_audio :],
            video[-layout.num_video :],
            modulation,
            index,
            sequence.modality,
            cos,
            sin,
        )
        theirs_video, theirs_audio = oracle(
            hidden_states=video[None],
            audio_hidden_states=audio[None],
            encoder_hidden_states=text[None],
            timestep=timesteps,
            timestep_indices=index.long(),
            token_tags=sequence.modality.long(),
            position_ids=sequence.position_ids,
            video_indices=video_indices,
            audio_indices=audio_indices,
            text_indices=rows[: layout.num_text],
            return_dict=False,
        )
    assert torch.equal(ours_video, theirs_video[0, -layout.num_video :])
    assert torch.equal(ours_audio, theirs_audio[0, -layout.num_audio :])


def test_conditions_keep_their_timestep_while_the_video_is_noisier():
    request = resolved(96, 64, 22)
    sequence = pack(request, modality(5), [keyframe(request, 0)])
    schedule = Schedule.uniform(50, 12.0, 3.0)
    seen = set()
    for step in range(schedule.num_forwards):
        timesteps, index = sequence.timestep_rows(1 - schedule.video[step], 1 - schedule.audio[step])
        seen.add(timesteps[index[5]].item())
        assert math.isclose(timesteps[index[-1]].item(), 1 - schedule.video[step].item(), abs_tol=1e-7)
    assert seen == {torch.tensor(0.999).item()}


def test_condition_rows_are_patches_like_those_of_the_video():
    latents = torch.randn(24, 2, 4, 6, generator=torch.Generator().manual_seed(0))
    from diffusers.modular_pipelines.minimax_h3.before_denoise import patchify_video_latents

    assert torch.equal(video_to_rows(latents), patchify_video_latents(latents[None], (1, 2, 2)))
