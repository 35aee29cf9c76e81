"""Keyframes and references, from pixels and samples to frames and sound, against diffusers on the same weights."""

from fractions import Fraction

import pytest
import torch
from PIL import Image
from torch import Tensor

from comfyui_h3.h3core.config import EngineConfig
from comfyui_h3.h3core.engine import Engine
from comfyui_h3.h3core.media.clips import MemoryClip
from comfyui_h3.h3core.media.references import (
    Keyframe,
    MediaRequest,
    ReferenceAudio,
    ReferenceImage,
    ReferenceVideo,
)
from comfyui_h3.h3core.models.text_encoder.template import media_items
from comfyui_h3.h3core.sampling.noise import Noise
from comfyui_h3.h3core.sampling.packing import audio_to_rows, pack
from comfyui_h3.h3core.types import Audio, Request
from comfyui_h3.tests.oracle.pipeline_oracle import diffusers_folder, pipeline
from comfyui_h3.tests.tolerances import LATENT_STEP, LATENT_STEPS_SHARE, PARITY, relative_error

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

SHORT_EDGE = 64
SIZE = {"width": 96, "height": 64}
NUM_FRAMES = 22
LONGER = 39  # a clip of 32 frames is cut to 22 for the VAE, and seen by the text encoder as 3 frames in 2 blocks
SIGMA_POINTS = 4
SEED = 5


def picture(seed: int, width: int, height: int) -> Tensor:
    """Smooth colours, (H, W, 3) uint8: nothing that a resize would turn into noise."""
    small = torch.rand(1, 3, 5, 7, generator=torch.Generator().manual_seed(seed))
    large = torch.nn.functional.interpolate(small, size=(height, width), mode="bicubic", align_corners=True)
    return (large[0].movedim(0, -1).clamp(0, 1) * 255).round().to(torch.uint8)


def clip(seed: int, width: int, height: int, num_frames: int) -> Tensor:
    """A picture that moves to the left, (F, H, W, 3) uint8."""
    whole = picture(seed, width + num_frames, height)
    return torch.stack([whole[:, frame : frame + width] for frame in range(num_frames)])


def sound(seed: int, seconds: float) -> Tensor:
    """(2, N) float32 at 32 kHz."""
    return 0.3 * torch.randn(2, round(seconds * 32000), generator=torch.Generator().manual_seed(seed))


FIRST, LAST = picture(1, 130, 70), picture(2, 90, 110)
WIDE, TALL = picture(3, 150, 100), picture(4, 64, 96)
MOVING, LONG = clip(5, 120, 80, 40), clip(6, 96, 64, 60)

CASES = {
    "first": {"keyframes": [(FIRST, 0)]},
    "last": {"keyframes": [(LAST, -1)]},
    "first and last": {"keyframes": [(FIRST, 0), (LAST, -1)]},
    "picture": {"references": [WIDE]},
    "two pictures": {"references": [TALL, WIDE]},
    "clip with sound": {"references": [(MOVING, 30, sound(7, 1.5))], "num_frames": LONGER},
    "silent clip": {"references": [(LONG, 24, None)]},
    "sound and picture": {"references": [sound(8, 0.6), WIDE]},
    "all": {
        "references": [TALL, (MOVING, 30, sound(9, 0.4)), sound(10, 2.0), (LONG, 24, None), WIDE],
        "num_frames": LONGER,
    },
}
PROMPTS = {"keyframes": "A red ball turns blue.", "references": "They meet. <d>[English] Hello!</d>"}


def our_request(case: dict) -> MediaRequest:
    keyframes = tuple(Keyframe(pixels=pixels, frame=frame) for pixels, frame in case.get("keyframes", ()))
    references = tuple(our_reference(medium) for medium in case.get("references", ()))
    return MediaRequest(**SIZE, num_frames=length(case), keyframes=keyframes, references=references)


def length(case: dict) -> int:
    return case.get("num_frames", NUM_FRAMES)


def our_reference(medium):
    if isinstance(medium, tuple):
        frames, fps, samples = medium
        soundtrack = None if samples is None else Audio(samples=samples)
        return ReferenceVideo(clip=MemoryClip(frames, Fraction(fps)), soundtrack=soundtrack, short_edge=SHORT_EDGE)
    if medium.dtype == torch.uint8:
        return ReferenceImage(pixels=medium, size="match")
    return ReferenceAudio(audio=Audio(samples=medium))


def their_inputs(case: dict) -> dict:
    if "keyframes" in case:
        return {
            "image" if frame == 0 else "last_image": Image.fromarray(pixels.numpy())
            for pixels, frame in case["keyframes"]
        }
    return {"references": [their_reference(medium) for medium in case["references"]]}


def their_reference(medium):
    from diffusers.modular_pipelines.minimax_h3 import references

    if isinstance(medium, tuple):
        frames, fps, samples = medium
        return references.MiniMaxH3VideoReference(
            frames=frames.numpy(), fps=float(fps), audio=samples, sample_rate=None if samples is None else 32000
        )
    if medium.dtype == torch.uint8:
        return references.MiniMaxH3ImageReference(image=Image.fromarray(medium.numpy()))
    return references.MiniMaxH3AudioReference(audio=medium, sample_rate=32000)


@pytest.fixture(scope="module")
def engine(tiny_h3):
    return Engine(EngineConfig(checkpoint=tiny_h3, device="cpu", precision="float32", quality="exact"))


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    pytest.importorskip("torchvision", reason="the media processors of diffusers need torchvision")
    return pipeline(diffusers_folder(tmp_path_factory.mktemp("oracle")), short_edge=SHORT_EDGE)


@pytest.fixture(scope="module", params=CASES)
def results(request, engine, pipe):
    """What both have at every stage of one case: (ours, theirs)."""
    case = CASES[request.param]
    prompt = PROMPTS["keyframes" if "keyframes" in case else "references"]
    media = engine.encode_media(our_request(case))
    conditioning = engine.encode(Request(prompt=prompt, **SIZE, num_frames=length(case)), media)
    drawn = Noise.draw(conditioning.request, SEED, video_channels=24, audio_channels=32)
    generator = torch.Generator().manual_seed(SEED)
    visual = [condition.video for condition in conditioning.conditions if condition.video is not None]
    noise = Noise(
        video=drawn.video,
        audio=drawn.audio,
        conditions=tuple(torch.randn(1, *latents.shape, generator=generator)[0] for latents in visual),
    )
    latents = engine.sample(conditioning, sigma_points=SIGMA_POINTS, noise=noise)
    sequence = pack(conditioning.request, conditioning.modality, conditioning.conditions)
    presenter, limits = engine._tokenizer(conditioning.request.task)
    ours = {
        "ids": presenter.present(prompt, media_items(media.presented, limits)).ids,
        "prompt_embeds": conditioning.text,
        "text_token_tags": conditioning.modality.long(),
        "position_ids": sequence.position_ids,
        "token_tags": sequence.modality.long(),
        "condition_latents": visual,
        "audio_condition_latents": [
            audio_to_rows(condition.audio) for condition in conditioning.conditions if condition.audio is not None
        ],
        "videos": torch.cat(list(engine.video_parts(latents)), dim=1).movedim(1, 0),
        "audio": engine.decode_audio(latents).samples,
    }
    seen: dict[str, Tensor] = {}
    hook = pipe.text_encoder.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(ids=kwargs["input_ids"][0]), with_kwargs=True
    )
    with torch.no_grad():
        state = pipe(
            prompt=prompt,
            **SIZE,
            num_frames=length(case),
            num_inference_steps=SIGMA_POINTS,
            output_type="pt",
            latents=noise.video[None],
            audio_latents=noise.audio,
            generator=torch.Generator().manual_seed(SEED),
            **their_inputs(case),
        )
    hook.remove()
    return ours, seen | {name: state.get(name) for name in ours.keys() - seen.keys()}


def test_ids_tags_and_states_of_the_text_are_equal(results):
    ours, theirs = results
    assert torch.equal(ours["ids"], theirs["ids"])
    assert torch.equal(ours["text_token_tags"], theirs["text_token_tags"])
    assert ours["prompt_embeds"].shape == theirs["prompt_embeds"][0].shape
    assert relative_error(ours["prompt_embeds"], theirs["prompt_embeds"][0]) <= PARITY


def test_condition_latents_are_equal(results):
    ours, theirs = results
    assert len(ours["condition_latents"]) == len(theirs["condition_latents"])
    for our, their in zip(ours["condition_latents"], theirs["condition_latents"], strict=True):
        assert relative_error(our, their[0]) <= PARITY
    for our, their in zip(ours["audio_condition_latents"], theirs["audio_condition_latents"] or [], strict=True):
        assert our.shape == their.shape
        assert relative_error(our, their) <= PARITY


def test_rows_and_positions_are_equal(results):
    ours, theirs = results
    assert torch.equal(ours["position_ids"], theirs["position_ids"].float())
    assert torch.equal(ours["token_tags"], theirs["token_tags"])


@pytest.mark.parametrize("name", ["videos", "audio"])
def test_frames_and_sound_are_equal(results, name):
    ours, theirs = results[0][name], results[1][name][0]
    assert ours.shape == theirs.shape
    assert theirs.std() > 1e-3
    assert relative_error(ours, theirs) <= PARITY


def test_default_quality_moves_a_few_latents_of_a_clip_by_one_step(engine, tiny_h3):
    """Its last clip of 17 is encoded from 5 frames: sums in another order, before latents are rounded to float16."""
    default = Engine(EngineConfig(checkpoint=tiny_h3, device="cpu", precision="float32"))
    request = our_request(CASES["all"])
    pairs = list(zip(default.encode_media(request).media, engine.encode_media(request).media, strict=True))
    for ours, exact in pairs:
        if ours.condition.kind != "video":
            continue
        moved = (ours.condition.video - exact.condition.video).abs() > PARITY
        assert moved.float().mean() < LATENT_STEPS_SHARE
        assert relative_error(ours.condition.video, exact.condition.video) < LATENT_STEP
    for ours, exact in pairs:
        for mine, wanted in ((ours.condition.audio, exact.condition.audio), (ours.view, exact.view)):
            assert mine is None or torch.equal(mine, wanted)
