"""The engine over the tiny H3: determinism, cancelling, memory, refusals."""

import dataclasses
import gc
import os
import shutil
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from comfyui_h3.h3core.config import EngineConfig
from comfyui_h3.h3core.engine import Engine
from comfyui_h3.h3core.errors import DeviceMemoryError, H3Error, OutputError, RequestError
from comfyui_h3.h3core.registry import get_engine
from comfyui_h3.h3core.request import resolve
from comfyui_h3.h3core.sampling.packing import pack
from comfyui_h3.h3core.sampling.schedule import Schedule
from comfyui_h3.h3core.sampling.steps import Steps
from comfyui_h3.h3core.types import Request

REQUEST = Request(prompt="a red ball", width=64, height=64, num_frames=22)
POINTS = 4


class Cancelled(BaseException):
    """As a host's interrupt may be: not an Exception."""


@pytest.fixture(scope="module")
def conditioning(tiny_engine):
    return tiny_engine.encode(REQUEST)


@pytest.fixture(scope="module")
def latents(tiny_engine, conditioning):
    return tiny_engine.sample(conditioning, sigma_points=POINTS)


def relative_distance(a, b):
    return float((a - b).norm() / b.norm())


def test_same_seed_gives_equal_tensors(tiny_engine, tiny_h3, conditioning, latents):
    other = Engine(tiny_engine.config)
    again = other.sample(other.encode(REQUEST), sigma_points=POINTS)
    assert torch.equal(again.video, latents.video)
    assert torch.equal(again.audio, latents.audio)
    assert torch.equal(other.decode_video(again).pixels, tiny_engine.decode_video(latents).pixels)
    assert torch.equal(other.decode_audio(again).samples, tiny_engine.decode_audio(latents).samples)


def test_default_seed_is_42(tiny_engine, conditioning, latents):
    assert torch.equal(tiny_engine.sample(conditioning, seed=42, sigma_points=POINTS).video, latents.video)
    assert relative_distance(tiny_engine.sample(conditioning, seed=43, sigma_points=POINTS).video, latents.video) > 0.1


@pytest.mark.parametrize("prompt", ["a red bal", "a", "雨の夜 🌧", "مرحبا", "a red ball ", "a red ball\r\n"])
def test_other_prompt_gives_other_latents(tiny_engine, latents, prompt):
    conditioning = tiny_engine.encode(dataclasses.replace(REQUEST, prompt=prompt))
    other = tiny_engine.sample(conditioning, sigma_points=POINTS)
    assert relative_distance(other.video, latents.video) > 1e-3
    assert relative_distance(other.audio, latents.audio) > 1e-3


def test_shapes_and_dtypes_of_every_stage(tiny_engine, conditioning, latents):
    assert conditioning.text.shape == (len(conditioning.modality), 128)
    assert latents.video.shape == (24, 7, 4, 4)
    assert latents.audio.shape == (2, 32, 37)
    frames, audio = tiny_engine.decode_video(latents), tiny_engine.decode_audio(latents)
    assert frames.pixels.shape == (22, 64, 64, 3)
    assert frames.pixels.dtype == torch.uint8
    assert audio.samples.shape == (2, 29_600)
    assert audio.samples.dtype == torch.float32
    assert all(x.device.type == "cpu" for x in (conditioning.text, latents.video, frames.pixels, audio.samples))


def test_frames_are_rounded_not_truncated(tiny_engine, latents):
    parts = torch.cat(list(tiny_engine.video_parts(latents)), dim=1)
    pixels = tiny_engine.decode_video(latents).pixels
    rounded = np.rint(np.float32(255) * parts.movedim(0, -1).numpy())
    assert np.array_equal(pixels.numpy(), rounded)


@pytest.mark.parametrize("frames", [5, 22, 39])
def test_every_legal_length_decodes(tiny_engine, frames):
    conditioning = tiny_engine.encode(dataclasses.replace(REQUEST, num_frames=frames))
    latents = tiny_engine.sample(conditioning, sigma_points=2)
    assert tiny_engine.decode_video(latents).pixels.shape[0] == frames


def test_bfloat16_runs_near_float32(tiny_h3, latents):
    engine = Engine(EngineConfig(checkpoint=tiny_h3, device="cpu", precision="bfloat16"))
    conditioning = engine.encode(REQUEST)
    assert conditioning.text.dtype == torch.bfloat16
    assert relative_distance(engine.sample(conditioning, sigma_points=POINTS).video, latents.video) < 0.1


def test_steps_are_reported_from_zero(tiny_engine, conditioning):
    seen = []
    tiny_engine.sample(conditioning, sigma_points=POINTS, on_step=lambda *step: seen.append(step))
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("at", [0, 1, 3])
def test_cancelled_sampling_leaves_the_engine_as_it_was(tiny_engine, conditioning, latents, at):
    def cancel(done, total):
        if done == at:
            raise Cancelled

    with pytest.raises(Cancelled):
        tiny_engine.sample(conditioning, sigma_points=POINTS, on_step=cancel)
    assert torch.equal(tiny_engine.sample(conditioning, sigma_points=POINTS).video, latents.video)


def test_cancelled_decode_leaves_the_engine_as_it_was(tiny_engine, latents):
    def cancel(done, total):
        raise Cancelled

    with pytest.raises(Cancelled):
        tiny_engine.decode_video(latents, on_progress=cancel)
    assert tiny_engine.decode_video(latents).pixels.float().std() > 1


@pytest.mark.parametrize("stage", ["text_encoder", "dit"])
def test_cancelled_load_leaves_nothing_and_the_next_job_loads(tiny_h3, conditioning, stage):
    engine = Engine(EngineConfig(checkpoint=tiny_h3, device="cpu", precision="float32"))

    def cancel(done, total):
        if done > total / 2:
            raise Cancelled

    run = {
        "text_encoder": lambda **on: engine.encode(REQUEST, **on),
        "dit": lambda **on: engine.sample(conditioning, sigma_points=2, **on),
    }[stage]
    with pytest.raises(Cancelled):
        run(on_load=cancel)
    assert not engine._weights._loaded
    run()


def test_load_counts_the_bytes_of_the_file(tiny_h3, conditioning):
    engine, seen = Engine(EngineConfig(checkpoint=tiny_h3, device="cpu")), []
    engine.sample(conditioning, sigma_points=2, on_load=lambda *step: seen.append(step))
    total = engine.checkpoints.first.transformer.num_bytes
    loaded = [step for step in seen if step[1] == total]
    assert loaded[0] == (0, total)
    assert loaded[-1] == (total, total)
    assert loaded == sorted(loaded)
    modulated, total = seen[len(loaded) :], engine.checkpoints.first.modulator.num_bytes
    assert modulated[0] == (0, total)
    assert modulated[-1] == (total, total)
    assert modulated == sorted(modulated)
    seen.clear()
    engine.sample(conditioning, sigma_points=2, on_load=lambda *step: seen.append(step))
    assert not seen  # they stay


def test_modulation_is_read_again_for_another_schedule_only(tiny_h3, conditioning):
    engine, reads = Engine(EngineConfig(checkpoint=tiny_h3, device="cpu")), []
    total = engine.checkpoints.first.modulator.num_bytes

    def count(done, of):
        if (done, of) == (total, total):
            reads.append(1)

    runs = {}
    for sigma_points in (3, 3, 4, 3):
        video = engine.sample(conditioning, sigma_points=sigma_points, on_load=count).video
        assert torch.equal(video, runs.setdefault(sigma_points, video))
    assert len(reads) == 3
    engine.unload()
    assert torch.equal(engine.sample(conditioning, sigma_points=3, on_load=count).video, runs[3])
    assert len(reads) == 4


def test_modulation_that_was_not_read_to_its_end_is_read_again(tiny_h3, conditioning):
    engine = Engine(EngineConfig(checkpoint=tiny_h3, device="cpu"))
    expected = engine.sample(conditioning, sigma_points=3)
    engine.sample(conditioning, sigma_points=4)
    total = engine.checkpoints.first.modulator.num_bytes

    def cancel(done, of):
        if of == total and done > total // 2:
            raise Cancelled

    with pytest.raises(Cancelled):
        engine.sample(conditioning, sigma_points=3, on_load=cancel)
    assert torch.equal(engine.sample(conditioning, sigma_points=3).video, expected.video)


def test_partitions_that_differ_in_their_modulation_alone_have_their_own(tiny_h3, tmp_path):
    root = shutil.copytree(tiny_h3, tmp_path / "copy")
    for file in sorted((root / "FL2VA/transformer").glob("*.safetensors")):
        tensors = load_file(file)
        for name in tensors:
            if "adaln_proj" in name:
                tensors[name] = tensors[name] * 2
        save_file(tensors, root / "Ref2VA/transformer" / file.name, metadata={"format": "pt"})
    shutil.copy(
        root / "FL2VA/transformer/model.safetensors.index.json",
        root / "Ref2VA/transformer/model.safetensors.index.json",
    )
    engine = Engine(EngineConfig(checkpoint=root, device="cpu"))
    assert engine._part("dit", "ref2va") == engine._part("dit", "t2va")  # the rest is shared
    request, _ = resolve(REQUEST)
    sequence = pack(request, torch.ones(3, dtype=torch.int32))
    steps = Steps.of(sequence, Schedule.uniform(3, 12.0, 3.0), exact=False)
    tables = {
        task: engine._tables.get(engine.checkpoints.of(task), steps, lambda done, total: None).blocks
        for task in ("t2va", "ref2va")
    }
    assert torch.equal(tables["ref2va"], 2 * tables["t2va"])


def test_replaced_files_make_another_engine(tiny_h3, tmp_path):
    root = shutil.copytree(tiny_h3, tmp_path / "copy")
    first = get_engine(EngineConfig(checkpoint=root))
    os.utime(root / "FL2VA/transformer/model-00001-of-00003.safetensors", ns=(1, 1))
    assert get_engine(EngineConfig(checkpoint=root)) is not first


def test_stage_without_memory_is_named(tiny_engine, conditioning, monkeypatch):
    def no_memory(done, total):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 80 << 30))
    with pytest.raises(DeviceMemoryError, match=r"sampling does not fit on cpu: 1.0 of 80.0 GiB are free.*dit 0.0"):
        tiny_engine.sample(conditioning, sigma_points=POINTS, on_step=no_memory)


def test_process_leaves_cleanly_in_the_middle_of_a_stage(tiny_h3):
    """As a host does on Ctrl-C: its main thread ends while a daemon thread samples."""
    program = """
import runpy, sys, threading
runpy.run_path(sys.argv[1])["register"]()
from comfyui_h3.h3core.config import EngineConfig
from comfyui_h3.h3core.registry import get_engine
from comfyui_h3.h3core.types import Request
engine = get_engine(EngineConfig(checkpoint=sys.argv[2], device="cpu"))
conditioning = engine.encode(Request(prompt="x", width=128, height=128, num_frames=22))
started = threading.Event()
step = lambda done, total: started.set()
threading.Thread(target=engine.sample, args=(conditioning,), kwargs={"on_step": step}, daemon=True).start()
started.wait()
"""
    bootstrap = Path(__file__).parents[2] / "_bootstrap.py"
    ran = subprocess.run(
        [sys.executable, "-c", program, bootstrap, tiny_h3], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr


def test_abandoned_parts_do_not_hold_the_engine(tiny_engine, latents):
    parts = tiny_engine.video_parts(latents)
    next(parts)
    del parts
    gc.collect()
    done = []
    thread = threading.Thread(target=lambda: done.append(tiny_engine.decode_video(latents)), daemon=True)
    thread.start()
    thread.join(60)
    assert done


def test_another_stage_may_run_between_parts(tiny_engine, latents):
    parts = tiny_engine.video_parts(latents)
    next(parts)
    assert tiny_engine.decode_audio(latents).samples.abs().max() > 0
    assert sum(part.shape[1] for part in parts) > 0


def test_encoding_is_cancelled_between_layers(tiny_engine):
    seen = []

    def cancel(done, total):
        seen.append((done, total))
        if done == 2:
            raise Cancelled

    request = dataclasses.replace(REQUEST, prompt="not encoded before")
    with pytest.raises(Cancelled):
        tiny_engine.encode(request, on_progress=cancel)
    assert seen == [(0, 5), (1, 5), (2, 5)]
    seen.clear()
    tiny_engine.encode(request, on_progress=lambda *step: seen.append(step))
    assert seen == [(done, 5) for done in range(6)]


def test_prompt_is_encoded_once(tiny_engine):
    first = tiny_engine.encode(dataclasses.replace(REQUEST, prompt="encoded once"))
    seen = []
    again = tiny_engine.encode(
        dataclasses.replace(REQUEST, prompt="encoded once", width=96), on_progress=lambda *step: seen.append(step)
    )
    assert torch.equal(first.text, again.text)
    assert again.request.width == 96
    assert seen == [(1, 1)]
    assert "encode" not in [stage.name for stage in again.timings.stages]


def test_states_that_are_not_finite_are_named(tiny_h3):
    engine = Engine(EngineConfig(checkpoint=tiny_h3, device="cpu"))
    engine.encode(REQUEST)
    engine._weights._loaded["text_encoder"].model.language_model.embed_tokens.weight.fill_(torch.nan)
    with pytest.raises(OutputError, match="text encoder"):
        engine.encode(dataclasses.replace(REQUEST, prompt="another prompt"))


def test_unloaded_weights_come_back(tiny_engine, conditioning, latents):
    tiny_engine.unload()
    assert torch.equal(tiny_engine.sample(conditioning, sigma_points=POINTS).video, latents.video)


def test_weights_are_read_by_the_stage_that_needs_them(tiny_h3):
    engine = Engine(EngineConfig(checkpoint=tiny_h3, device="cpu"))
    assert not engine._weights._loaded
    engine.encode(REQUEST)
    assert set(engine._weights._loaded) == {"text_encoder"}


@pytest.mark.parametrize(
    "fields", [{"width": 33}, {"num_frames": 1}, {"prompt": " "}, {"prompt": "a <|image_pad|>"}, {"height": 0}]
)
def test_impossible_request_reads_no_weights(tiny_h3, fields):
    engine = Engine(EngineConfig(checkpoint=tiny_h3, device="cpu"))
    with pytest.raises(RequestError):
        engine.encode(dataclasses.replace(REQUEST, **fields))
    assert not engine._weights._loaded


def test_size_that_memory_cannot_hold_is_refused_before_anything_is_read(tiny_h3):
    """The kernel would kill the host in the middle of the job."""
    engine = Engine(EngineConfig(checkpoint=tiny_h3, device="cpu"))
    with pytest.raises(RequestError, match=r"3592 frames of 4096x4096 need about \d+ GiB.*fewer frames"):
        engine.encode(dataclasses.replace(REQUEST, width=4096, height=4096, num_frames=3592))
    assert not engine._weights._loaded


def test_reference_weights_refuse_text_alone(tiny_h3):
    engine = Engine(EngineConfig(checkpoint=tiny_h3, partition="ref2va", device="cpu"))
    with pytest.raises(RequestError, match="fl2va"):
        engine.encode(REQUEST)


def test_kernels_that_cannot_run_are_refused_before_the_first_job(tiny_h3):
    with pytest.raises(RequestError, match="kernels=triton cannot run"):
        Engine(EngineConfig(checkpoint=tiny_h3, device="cpu", precision="float32", kernels="triton"))


def test_conditioning_of_another_encoder_is_refused(tiny_engine, conditioning):
    other = dataclasses.replace(conditioning, text=torch.zeros(3, 64), modality=torch.ones(3, dtype=torch.int32))
    with pytest.raises(RequestError, match="64 wide"):
        tiny_engine.sample(other)


@pytest.mark.parametrize(("step", "value"), [(0, torch.nan), (2, torch.inf)])
def test_values_that_are_not_finite_stop_the_sampling_at_their_step(tiny_h3, conditioning, step, value):
    engine = Engine(EngineConfig(checkpoint=tiny_h3, device="cpu", precision="float32"))
    engine.sample(conditioning, sigma_points=2)
    calls = []

    def poison(module, inputs, output):
        calls.append(None)
        return output.fill_(value) if len(calls) == step + 1 else output

    engine._weights._loaded["dit"].final_layer.video_out.register_forward_hook(poison)
    with pytest.raises(H3Error, match=f"step {step + 1} of 3"):
        engine.sample(conditioning, sigma_points=POINTS)


def test_latents_that_are_not_finite_do_not_become_a_picture_or_a_sound(tiny_engine, latents):
    video, audio = latents.video.clone(), latents.audio.clone()
    video[0, 3, 1, 1] = audio[0, 0, 0] = torch.nan
    broken = dataclasses.replace(latents, video=video, audio=audio)
    with pytest.raises(OutputError, match="video decoder"):
        tiny_engine.decode_video(broken)
    with pytest.raises(OutputError, match="audio decoder"):
        tiny_engine.decode_audio(broken)


def test_timings_name_every_stage_once(tiny_engine, latents):
    frames, audio = tiny_engine.decode_video(latents), tiny_engine.decode_audio(latents)
    names = [stage.name for stage in (frames.timings + audio.timings).stages]
    assert len(names) == len(set(names))
    assert {"encode", "sample", "decode_video", "decode_audio"} <= set(names)
    sampled = next(stage for stage in frames.timings.stages if stage.name == "sample")
    assert sampled.num_units == 3
    assert sampled.seconds > 0


def test_same_settings_share_one_engine_until_nobody_holds_it(tiny_h3, tmp_path):
    root = shutil.copytree(tiny_h3, tmp_path / "copy")
    first = get_engine(EngineConfig(checkpoint=root))
    assert get_engine(EngineConfig(checkpoint=str(root))) is first
    assert get_engine(EngineConfig(checkpoint=root, partition="ref2va")) is not first
    alive = weakref.ref(first)
    del first
    gc.collect()
    assert alive() is None


def test_description_names_weights_device_and_precision(tiny_engine):
    text = tiny_engine.describe()
    for word in ("fl2va", "4 blocks", "cpu", "float32"):
        assert word in text
