"""The DiT, its packed sequence, its sigmas and its steps against diffusers: equal bit for bit."""

import pytest
import torch

from comfyui_h3.h3core.checkpoint.official import Checkpoint
from comfyui_h3.h3core.sampling.packing import pack, video_to_rows
from comfyui_h3.h3core.sampling.schedule import Schedule, euler_step
from comfyui_h3.h3core.types import ResolvedRequest
from comfyui_h3.tests.oracle.pipeline_oracle import diffusers_folder, transformer

pytestmark = pytest.mark.oracle


def request(width=96, height=64, num_frames=22, num_latent_frames=7, num_audio_latents=37):
    return ResolvedRequest(
        width=width,
        height=height,
        num_frames=num_frames,
        num_latent_frames=num_latent_frames,
        num_audio_latents=num_audio_latents,
    )


def text_modality(num_text, visual=()):
    modality = torch.ones(num_text, dtype=torch.int32)
    modality[list(visual)] = 0
    return modality


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("times", [(0.2, 0.45), (0.0, 0.0), (0.999, 0.9995)])
def test_forward_is_bit_equal(tiny_h3, tmp_path_factory, dtype, times):
    sequence = pack(request(), text_modality(9, visual=(3, 4)))
    layout = sequence.layout
    g = torch.Generator().manual_seed(0)
    text = torch.randn(layout.num_text, 128, generator=g).to(dtype)
    video, audio = torch.randn(layout.num_video, 96, generator=g), torch.randn(layout.num_audio, 32, generator=g)
    timesteps, index = sequence.timestep_rows(*torch.tensor(times))
    rows = torch.arange(layout.num_rows)

    checkpoint = Checkpoint.open(tiny_h3, "fl2va")
    dit = checkpoint.load_dit(torch.device("cpu"), dtype)
    oracle = transformer(diffusers_folder(tmp_path_factory.getbasetemp()), dtype)
    with torch.no_grad():
        cos, sin = dit.rope(sequence.position_ids, dtype)
        modulation = checkpoint.read_modulation([timesteps], torch.device("cpu"), dtype)
        ours_audio, ours_video = dit(dit.embed_text(text), audio, video, modulation, index, sequence.modality, cos, sin)
        theirs_video, theirs_audio = oracle(
            hidden_states=video[None],
            audio_hidden_states=audio[None],
            encoder_hidden_states=text[None],
            timestep=timesteps,
            timestep_indices=index.long(),
            token_tags=sequence.modality.long(),
            position_ids=sequence.position_ids,
            video_indices=rows[layout.video],
            audio_indices=rows[layout.audio],
            text_indices=rows[: layout.num_text],
            return_dict=False,
        )
    assert ours_video.dtype == ours_audio.dtype == torch.float32
    assert torch.equal(ours_video, theirs_video[0])
    assert torch.equal(ours_audio, theirs_audio[0])


@pytest.mark.parametrize(
    ("sizes", "num_text"),
    [
        ((1344, 768, 124, 37, 207), 537),
        ((768, 448, 243, 72, 405), 66),
        ((512, 2016, 22, 7, 37), 1),
        ((768, 768, 362, 107, 603), 100),
    ],
)
def test_packed_sequence_is_equal(sizes, num_text):
    from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep

    resolved = request(*sizes)
    modality = text_modality(num_text, visual=range(num_text // 3))
    sequence = pack(resolved, modality)
    positions, tags, video, audio, _, _, _ = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        modality,
        resolved.num_latent_frames,
        resolved.latent_height,
        resolved.latent_width,
        resolved.num_audio_latents,
        (1, 2, 2),
        2,
        2,
        0,
    )
    rows = torch.arange(sequence.layout.num_rows)
    assert torch.equal(sequence.position_ids, positions.float())
    assert torch.equal(sequence.modality.long(), tags)
    assert torch.equal(rows[sequence.layout.video], video)
    assert torch.equal(rows[sequence.layout.audio], audio)


@pytest.mark.parametrize("times", [(0.0, 0.0), (0.25, 0.6), (0.7, 0.3)])
def test_timestep_rows_are_equal(times):
    from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3SetTimestepsStep

    sequence = pack(request(), text_modality(5))
    rows = torch.arange(sequence.layout.num_rows)
    theirs = MiniMaxH3SetTimestepsStep.build_row_timesteps(
        rows[sequence.layout.video], rows[sequence.layout.audio], 0, 0, 5, *times, 0.999, 1.0
    )
    timesteps, index = sequence.timestep_rows(*torch.tensor(times))
    assert torch.equal(timesteps, theirs[0])
    assert torch.equal(index.long(), theirs[1])


def test_video_rows_are_equal():
    from diffusers.modular_pipelines.minimax_h3.before_denoise import patchify_video_latents

    latents = torch.randn(24, 7, 8, 6)
    assert torch.equal(video_to_rows(latents), patchify_video_latents(latents[None], (1, 2, 2)).squeeze(0))


@pytest.mark.parametrize("points", [50, 2, 9, 200])
@pytest.mark.parametrize("shift", [12.0, 3.0])
def test_sigmas_and_steps_are_equal(points, shift):
    from diffusers import MiniMaxH3Scheduler

    scheduler = MiniMaxH3Scheduler(shift=shift)
    scheduler.set_timesteps(points)
    sigmas = Schedule.uniform(points, shift, shift).video
    assert torch.equal(sigmas, scheduler.sigmas.cpu())

    g = torch.Generator().manual_seed(0)
    ours = theirs = torch.randn(37, 96, generator=g)
    for step, timestep in enumerate(scheduler.timesteps):
        velocity = torch.randn(37, 96, generator=g)
        ours = euler_step(ours, velocity, sigmas, step)
        theirs = scheduler.step(velocity, timestep, theirs, return_dict=False)[0]
    assert torch.equal(ours, theirs)
