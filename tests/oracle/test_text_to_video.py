"""The whole text-to-video path, prompt to frames and samples, against diffusers on the same weights."""

import pytest
import torch

from comfyui_h3.h3core.sampling.noise import Noise
from comfyui_h3.h3core.types import Request
from comfyui_h3.tests.oracle.pipeline_oracle import diffusers_folder, pipeline
from comfyui_h3.tests.tolerances import PARITY, relative_error

PROMPT = (
    "integrated_multimodal_description: [Shot 1] A red ball (S1) says: <d>[English] Hi!</d>\n\nnon_diegetic_music: N/A"
)
SIZE = {"width": 96, "height": 64, "num_frames": 22}

pytestmark = [pytest.mark.oracle, pytest.mark.slow]


@pytest.fixture(scope="module")
def results(tiny_engine, tmp_path_factory):
    """(ours, theirs): text, latents, frames in 0..1 and waveform of 49 forwards from the same noise."""
    pipe = pipeline(diffusers_folder(tmp_path_factory.mktemp("oracle")))
    conditioning = tiny_engine.encode(Request(prompt=PROMPT, **SIZE))
    noise = Noise.draw(conditioning.request, 7, video_channels=24, audio_channels=32)
    latents = tiny_engine.sample(conditioning, sigma_points=50, noise=noise)
    ours = {
        "prompt_embeds": conditioning.text,
        "videos": torch.cat(list(tiny_engine.video_parts(latents)), dim=1).movedim(1, 0),
        "audio": tiny_engine.decode_audio(latents).samples,
    }
    with torch.no_grad():
        state = pipe(
            prompt=PROMPT,
            num_inference_steps=50,
            output_type="pt",
            latents=noise.video[None],
            audio_latents=noise.audio,
            **SIZE,
        )
    theirs = {name: state.get(name) for name in ours}
    return ours, theirs


@pytest.mark.parametrize("name", ["prompt_embeds", "videos", "audio"])
def test_result_equals_diffusers(results, name):
    ours, theirs = results[0][name], results[1][name]
    assert ours.shape == theirs.squeeze(0).shape
    assert relative_error(ours, theirs.squeeze(0)) <= PARITY


def test_frames_are_a_picture(results):
    frames = results[0]["videos"]
    assert frames.shape == (22, 3, 64, 96)
    assert frames.std() > 0.05
    assert (frames[0] - frames[-1]).abs().mean() > 0.01
