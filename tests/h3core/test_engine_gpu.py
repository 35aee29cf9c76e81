"""The engine on a CUDA device: the same numbers as on the CPU, and as without the kernels."""

import dataclasses
import gc
from fractions import Fraction

import pytest
import torch

from comfyui_h3.h3core.config import EngineConfig
from comfyui_h3.h3core.engine import Engine
from comfyui_h3.h3core.errors import DeviceMemoryError
from comfyui_h3.h3core.media.clips import MemoryClip
from comfyui_h3.h3core.media.references import Keyframe, MediaRequest, ReferenceImage, ReferenceVideo
from comfyui_h3.h3core.request import resolve
from comfyui_h3.h3core.types import Audio, Request
from comfyui_h3.tests.tolerances import LATENT_STEPS_SHARE

pytestmark = pytest.mark.gpu

REQUEST = Request(prompt="a red ball", width=96, height=64, num_frames=22)

G = torch.Generator().manual_seed(0)
MEDIA = MediaRequest(
    width=96,
    height=64,
    num_frames=22,
    references=(
        ReferenceImage(pixels=torch.randint(0, 256, (64, 96, 3), dtype=torch.uint8, generator=G), size="match"),
        ReferenceVideo(
            clip=MemoryClip(torch.randint(0, 256, (22, 64, 96, 3), dtype=torch.uint8, generator=G), Fraction(24)),
            soundtrack=Audio(samples=0.1 * torch.randn(2, 24000, generator=G)),
            short_edge=64,
        ),
    ),
    keyframes=(Keyframe(pixels=torch.randint(0, 256, (64, 96, 3), dtype=torch.uint8, generator=G)),),
)


def relative_distance(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def run(folder, **settings):
    engine = Engine(EngineConfig(checkpoint=folder, **settings))
    conditioning = engine.encode(REQUEST)
    return engine, conditioning, engine.sample(conditioning, sigma_points=50)


@pytest.fixture(scope="module")
def on_cpu(tiny_engine):
    conditioning = tiny_engine.encode(REQUEST)
    return tiny_engine, conditioning, tiny_engine.sample(conditioning, sigma_points=50)


def test_float32_equals_the_cpu(tiny_h3, on_cpu):
    cpu, conditioning, latents = on_cpu
    engine, ours, sampled = run(tiny_h3, device="cuda", precision="float32")
    assert relative_distance(ours.text, conditioning.text) < 1e-5
    assert relative_distance(sampled.video, latents.video) < 1e-4
    assert relative_distance(sampled.audio, latents.audio) < 1e-4
    assert relative_distance(engine.decode_audio(latents).samples, cpu.decode_audio(latents).samples) < 1e-4
    difference = engine.decode_video(latents).pixels.int() - cpu.decode_video(latents).pixels.int()
    assert difference.abs().max() <= 2  # the decoder's products are float16 on a GPU


def test_kernels_change_nothing_but_the_order_of_sums(tiny_h3):
    _, _, fused = run(tiny_h3, device="cuda", precision="bfloat16", kernels="triton")
    _, _, eager = run(tiny_h3, device="cuda", precision="bfloat16", kernels="torch")
    assert relative_distance(fused.video, eager.video) < 0.02
    assert relative_distance(fused.audio, eager.audio) < 0.02


def test_two_runs_are_equal(tiny_h3):
    _, _, first = run(tiny_h3, device="cuda")
    _, _, second = run(tiny_h3, device="cuda")
    assert torch.equal(first.video, second.video)
    assert torch.equal(first.audio, second.audio)


def test_stage_without_memory_is_named_and_the_next_job_runs(tiny_h3):
    engine, conditioning, latents = run(tiny_h3, device="cuda")
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / torch.cuda.mem_get_info()[1] + 1e-6)
    try:
        with pytest.raises(DeviceMemoryError, match=r"sampling does not fit on cuda:0: .* GiB are free"):
            engine.sample(sized(conditioning, num_frames=362), sigma_points=2)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(engine.sample(conditioning, sigma_points=50).video, latents.video)


def sized(conditioning, num_frames):
    """The same prompt for a clip of another length."""
    return dataclasses.replace(
        conditioning, request=resolve(dataclasses.replace(REQUEST, width=1344, height=768, num_frames=num_frames))[0]
    )


def test_media_in_float32_equal_the_cpu(tiny_h3, tiny_engine):
    """The latents of a medium are rounded to float16, so a sum in another order moves a few of them by one step."""
    engine = Engine(EngineConfig(checkpoint=tiny_h3, device="cuda", precision="float32"))
    ours, theirs = engine.encode_media(MEDIA), tiny_engine.encode_media(MEDIA)
    for one, other in zip(ours.media, theirs.media, strict=True):
        for mine, wanted in (
            (one.condition.video, other.condition.video),
            (one.condition.audio, other.condition.audio),
        ):
            if mine is not None:
                assert relative_distance(mine, wanted) < 1e-4
                assert ((mine - wanted).abs() > 1e-4 * wanted.abs().max()).float().mean() < LATENT_STEPS_SHARE
    request = dataclasses.replace(REQUEST, prompt="they meet")
    conditioning = tiny_engine.encode(request, theirs)
    assert relative_distance(engine.encode(request, theirs).text, conditioning.text) < 1e-5
    wanted = tiny_engine.sample(conditioning, sigma_points=10)
    sampled = engine.sample(conditioning, sigma_points=10)
    assert relative_distance(sampled.video, wanted.video) < 1e-4
    assert relative_distance(sampled.audio, wanted.audio) < 1e-4


def test_unload_gives_the_memory_back(tiny_h3):
    gc.collect()  # engines of the tests before
    before = torch.cuda.memory_allocated()
    engine, _, latents = run(tiny_h3, device="cuda")
    engine.decode_video(latents)
    assert torch.cuda.memory_allocated() > before
    engine.unload()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
