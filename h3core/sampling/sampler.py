"""The denoising loop: both streams, one packed sequence, one forward per step."""

from __future__ import annotations

import torch
from torch import Tensor

from comfyui_h3.h3core.errors import H3Error
from comfyui_h3.h3core.models.dit.adaln import Modulation
from comfyui_h3.h3core.models.dit.model import DiT
from comfyui_h3.h3core.models.precision import exact_fp32
from comfyui_h3.h3core.sampling.noise import Noise, noised
from comfyui_h3.h3core.sampling.packing import (
    audio_from_rows,
    audio_to_rows,
    video_from_rows,
    video_to_rows,
)
from comfyui_h3.h3core.sampling.schedule import euler_step
from comfyui_h3.h3core.sampling.steps import Steps
from comfyui_h3.h3core.types import Conditioning, Progress


def sample(
    dit: DiT,
    modulation: Modulation,
    conditioning: Conditioning,
    noise: Noise,
    steps: Steps,
    device: torch.device,
    on_step: Progress | None = None,
) -> tuple[Tensor, Tensor]:
    """Denoised latents on the CPU, float32, normalised: video (24, T, H/16, W/16), audio (2, 32, A).

    steps: of the packed conditioning; modulation: the tables of its timesteps, on ``device``.
    ``on_step(done, total)`` runs before the first forward and after each; what it raises leaves the model as it was.
    Raises H3Error when a forward gives values that are not finite, naming the step.
    """
    request, sequence, schedule = conditioning.request, steps.sequence, steps.schedule
    # All that is constant over the loop is made before it; inside, nothing waits for the device but the checks.
    rows = {id(index): index.to(device) for index in steps.rows}
    places = [place.int().to(device) for place in steps.places]
    modality = sequence.modality.to(device)
    cos, sin = dit.rope(sequence.position_ids.to(device), dit.dtype)
    with exact_fp32():
        prefix = torch.cat(_prefix(dit, conditioning, noise, device))
    video = video_to_rows(noise.video).to(device)
    audio = audio_to_rows(noise.audio).to(device)
    if on_step is not None:
        on_step(0, schedule.num_forwards)
    for step, place in enumerate(places):
        timestep_index = place[rows[id(steps.rows[step])]]
        with exact_fp32():  # the first and last products of the model are float32, which TF32 is not
            audio_velocity, video_velocity = dit(prefix, audio, video, modulation, timestep_index, modality, cos, sin)
        video = euler_step(video, video_velocity, schedule.video, step)
        audio = euler_step(audio, audio_velocity, schedule.audio, step)
        if not torch.isfinite(torch.stack([video.sum(), audio.sum()])).all():
            raise H3Error(
                f"sampling gave values that are not finite at step {step + 1} of {schedule.num_forwards}; "
                "the weights may be damaged, or their precision too low"
            )
        if on_step is not None:
            on_step(step + 1, schedule.num_forwards)
    video_latents = video_from_rows(video.cpu(), request.num_latent_frames, request.latent_height, request.latent_width)
    return video_latents.contiguous(), audio_from_rows(audio.cpu())


def _prefix(dit: DiT, conditioning: Conditioning, noise: Noise, device: torch.device) -> list[Tensor]:
    """Embedded rows that are not denoised: text, then of each condition its sound, then its picture."""
    rows = [dit.embed_text(conditioning.text.to(device))]
    noises = iter(noise.conditions)
    for condition in conditioning.conditions:
        if condition.audio is not None:
            rows.append(dit.embed_audio(audio_to_rows(condition.audio).to(device)))
        if condition.video is not None:
            rows.append(dit.embed_video(video_to_rows(noised(condition.video, next(noises))).to(device)))
    return rows
