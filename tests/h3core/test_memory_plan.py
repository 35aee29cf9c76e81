"""The plan of a job's memory: arithmetic of stages, who leaves, and the released model on the GPUs it is run on."""

import itertools
import json
import logging
from dataclasses import replace

import pytest
import torch

from comfyui_h3.h3core.checkpoint.loader import build, num_bytes
from comfyui_h3.h3core.config import EngineConfig
from comfyui_h3.h3core.engine import Engine
from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.estimate import DIT_BYTES, MODULATOR_BYTES, TABLES_BYTES, TEXT_ENCODER_BYTES, VAE_BYTES, estimate
from comfyui_h3.h3core.memory_needs import (
    DECODE_AUDIO_BYTES_PER_LATENT,
    ENCODE_AUDIO_BYTES,
    ENCODE_TILE_BYTES,
    USUAL_TEXT_ROWS,
    decode_audio_bytes,
    decode_video_bytes,
    encode_bytes,
    layer_bytes,
    timestep_bytes,
)
from comfyui_h3.h3core.memory_plan import FIXED_BYTES, GIB, MARGIN, MemoryPlan, Need, plan_memory
from comfyui_h3.h3core.models.audio_vae.config import AudioVAEConfig
from comfyui_h3.h3core.models.audio_vae.decoder import AudioDecoder
from comfyui_h3.h3core.models.audio_vae.encoder import AudioEncoder
from comfyui_h3.h3core.models.dit.adaln import Modulator
from comfyui_h3.h3core.models.dit.config import DiTConfig
from comfyui_h3.h3core.models.dit.model import DiT
from comfyui_h3.h3core.models.text_encoder.config import TextEncoderConfig
from comfyui_h3.h3core.models.text_encoder.encoder import TextEncoder
from comfyui_h3.h3core.models.video_vae.config import VideoVAEConfig
from comfyui_h3.h3core.models.video_vae.decoder import VideoDecoder
from comfyui_h3.h3core.models.video_vae.encoder import VideoEncoder
from comfyui_h3.h3core.request import resolve_size
from comfyui_h3.h3core.residency import Residency
from comfyui_h3.h3core.sampling.packing import layout_of
from comfyui_h3.h3core.types import Request


def need(part, weights, work=0, setup=0):
    """In GiB."""
    sizes = {"weight_bytes": weights, "working_bytes": work, "setup_bytes": setup}
    return Need(stage=f"run {part}", part=part, **{name: int(size * GIB) for name, size in sizes.items()})


JOB = (need("text", 48, 0.5), need("dit", 38, 10, setup=1), need("video", 4, 2), need("audio", 1, 0.5))


def test_room_of_a_stage_is_its_weights_its_work_with_a_margin_and_a_fixed_part():
    assert need("a", 3, 2).room_bytes == 3 * GIB + int(MARGIN * 2 * GIB) + FIXED_BYTES


def test_what_is_there_before_the_work_is_not_there_beside_it():
    assert need("a", 3, 2, setup=1).peak_bytes == 5 * GIB
    assert need("a", 3, 2, setup=4).peak_bytes == 7 * GIB
    assert need("a", 3, 2, setup=4).room_bytes == 7 * GIB + FIXED_BYTES


def test_all_stay_where_all_fit():
    plan = plan_memory(JOB, 141 * GIB, tables_bytes=GIB)
    assert plan.fits
    assert plan.leaving == frozenset()
    assert plan.residence("text") == "kept"
    assert plan.peak_bytes == (48 + 38 + 4 + 1 + 10 + 1) * GIB  # while it samples


def test_a_job_without_a_limit_keeps_all():
    assert plan_memory(JOB, None).leaving == frozenset()


def test_encoder_and_transformer_take_turns_where_only_one_fits():
    plan = plan_memory(JOB, 80 * GIB)
    assert plan.leaving == {"text", "dit"}
    assert plan.fits
    assert plan.residence("text") == "leaves after run text"
    assert plan.stage_peak_bytes(JOB[1]) == (38 + 10 + 4 + 1) * GIB


def test_the_fewest_bytes_leave():
    """One of the small ones is enough here, and neither of the large ones has to be read again."""
    capacity = sum(need.weight_bytes for need in JOB) + int(MARGIN * 10 * GIB) + FIXED_BYTES
    assert plan_memory(JOB, capacity).leaving == frozenset()
    assert plan_memory(JOB, capacity - 1).leaving == {"audio"}
    assert plan_memory(JOB, capacity - GIB - 1).leaving == {"video"}


@pytest.mark.parametrize("capacity", range(8, 120, 7))
def test_no_cheaper_choice_fits(capacity):
    plan = plan_memory(JOB, capacity * GIB)
    sizes = {need.part: need.weight_bytes for need in JOB}
    cost = sum(sizes[part] for part in plan.leaving)
    for count in range(len(sizes) + 1):
        for leaving in itertools.combinations(sizes, count):
            if sum(map(sizes.get, leaving)) < cost:
                assert not replace(plan, leaving=frozenset(leaving)).fits


def test_a_job_that_cannot_fit_says_so_and_gives_all_it_can():
    plan = plan_memory(JOB, 40 * GIB)
    assert not plan.fits
    assert plan.leaving == {"text", "dit", "video", "audio"}
    assert "does not fit" in plan.describe()


def test_tables_are_there_in_every_stage():
    plan = plan_memory(JOB, None, tables_bytes=GIB)
    assert plan.beside_bytes(JOB[0]) == (38 + 4 + 1 + 1) * GIB
    assert plan.beside_bytes(JOB[1]) == (48 + 4 + 1 + 1) * GIB


def test_who_comes_again_last_leaves_first():
    plan = MemoryPlan(needs=JOB)
    assert plan.leave_order("dit", ["video", "text", "audio", "dit"]) == ["text", "audio", "video"]
    assert plan.leave_order("text", ["text", "dit", "audio"]) == ["audio", "dit"]
    leaving = replace(plan, leaving=frozenset(["video"]))
    assert leaving.leave_order("dit", ["video", "text", "other", "audio"]) == ["other", "video", "text", "audio"]


def test_without_a_plan_the_longest_loaded_leaves_first():
    assert MemoryPlan().leave_order("dit", ["b", "dit", "a"]) == ["b", "a"]


def test_plans_are_the_same_whatever_else_the_device_holds():
    assert plan_memory(JOB, 141 * GIB) == plan_memory(JOB, 139 * GIB)
    assert plan_memory(JOB, 141 * GIB) != plan_memory(JOB, 80 * GIB)


def test_description_has_a_line_of_each_stage_that_adds_up():
    lines = plan_memory(JOB, 80 * GIB, tables_bytes=GIB).describe().splitlines()
    assert lines[0] == "GiB: peak 54.5 of 80.0"
    assert len(lines) == 1 + len(JOB)
    stage = "run text text 48.0 weights (leaves after run text) + 0.5 work + 6.0 beside = 54.5"
    assert " ".join(lines[1].split()) == stage


class TestEngine:
    """Over the tiny H3."""

    SIZE = {"width": 128, "height": 96, "num_frames": 22}  # noqa: RUF012

    def test_needs_are_those_of_the_modules_and_the_rows(self, tiny_engine):
        plan = tiny_engine.plan(Request(prompt="a cat", **self.SIZE))
        resolved, _ = resolve_size(128, 96, 22, None, "t2va")
        checkpoint = tiny_engine.checkpoints.of("t2va")
        modules = {
            "text_encoder": checkpoint.new_text_encoder(torch.float32),
            "dit": checkpoint.new_dit(torch.float32),
            "video_decoder": checkpoint.new_video_decoder(torch.float32),
            "audio_decoder": checkpoint.new_audio_decoder(),
        }
        assert [need.stage for need in plan.needs] == ["encode", "sample", "decode_video", "decode_audio"]
        assert {need.part: need.weight_bytes for need in plan.needs} == {
            part: num_bytes(module) for part, module in modules.items()
        }
        rows = layout_of(resolved, USUAL_TEXT_ROWS).num_rows
        assert [need.working_bytes for need in plan.needs] == [
            encode_bytes(USUAL_TEXT_ROWS),
            rows * checkpoint.dit_config.bytes_per_row(4),
            decode_video_bytes(resolved),
            resolved.num_audio_latents * DECODE_AUDIO_BYTES_PER_LATENT,
        ]
        modulator = checkpoint.new_modulator(torch.float32)
        assert plan.needs[1].setup_bytes == layer_bytes(modulator)
        assert plan.tables_bytes == 100 * timestep_bytes(modulator)
        assert plan.leaving == frozenset()

    def test_impossible_size_has_no_plan(self, tiny_engine):
        with pytest.raises(RequestError, match="use 704 or 736"):
            tiny_engine.plan(Request(prompt="a cat", width=1344, height=720))

    def test_plan_is_told_once_before_weights_are_read(self, tiny_h3, monkeypatch, caplog):
        """On a "GPU" whose free memory the test sets; the weights stay on the CPU."""
        engine = Engine(EngineConfig(checkpoint=tiny_h3, device="cpu", precision="float32"))
        monkeypatch.setattr(Residency, "capacity_bytes", lambda self: 100 * GIB)
        engine.device = torch.device("cuda")
        request, _ = resolve_size(128, 96, 22, None, "t2va")
        with caplog.at_level(logging.INFO, "comfyui_h3.h3core.engine"):
            engine._prepare_memory(request)
            engine._prepare_memory(request)
            other, _ = resolve_size(128, 96, 39, None, "t2va")
            engine._prepare_memory(other)
        told = [message for message in caplog.messages if message.startswith("memory on cuda for 128x96, ")]
        assert len(told) == len(caplog.messages) == 2
        assert "22 frames, GiB: peak" in told[0]
        assert not engine._weights._loaded

    def test_media_have_stages_before_the_prompt(self, tiny_engine):
        request, _ = resolve_size(128, 96, 22, None, "fl2va")
        needs = tiny_engine._needs.plan(request).needs
        assert [need.part for need in needs[:3]] == ["video_encoder", "audio_encoder", "text_encoder"]
        assert needs[0].working_bytes == ENCODE_TILE_BYTES


def test_tables_of_a_timestep_are_those_the_modulator_makes():
    config = DiTConfig(num_layers=3, hidden_size=48, time_embed_dim=8, time_embed_hidden_size=16)
    modulator = build(lambda: Modulator(config), torch.bfloat16)
    values = 3 * 18 * 48 + 2 * 48
    assert timestep_bytes(modulator) == 2 * values
    assert layer_bytes(modulator) == max(num_bytes(modulator.blocks[0]), num_bytes(modulator.time_embedder))


@pytest.fixture(scope="module")
def release(official_data):
    """Bytes of the parts of the released model as a GPU holds them in bf16, and its modulator; all on meta."""

    def read(name):
        return json.loads((official_data / "FL2VA" / name).read_text())

    text = TextEncoderConfig.from_dict(read("text_encoder/config.json"), "config.json")
    video = VideoVAEConfig.from_dicts(read("video_vae/config.json"), read("video_vae/source/config.json"))
    audio = AudioVAEConfig.from_dicts(read("audio_vae/config.json"), read("audio_vae/metadata.json"))
    modules = {
        "text_encoder": build(lambda: TextEncoder(text), torch.bfloat16),
        "dit": build(lambda: DiT(DiTConfig()), torch.bfloat16),
        "video_encoder": build(lambda: VideoEncoder(video), torch.float32),
        "video_decoder": build(lambda: VideoDecoder(video), torch.float16),
        "audio_encoder": build(lambda: AudioEncoder(audio), torch.float32),
        "audio_decoder": build(lambda: AudioDecoder(audio), torch.float32),
    }
    modulator = build(lambda: Modulator(DiTConfig()), torch.bfloat16)
    return {part: num_bytes(module) for part, module in modules.items()}, modulator


def release_plan(release, num_frames, capacity_bytes):
    sizes, modulator = release
    request, _ = resolve_size(1344, 768, num_frames, None, "fl2va")
    rows = layout_of(request, USUAL_TEXT_ROWS).num_rows
    work = {
        "video_encoder": ENCODE_TILE_BYTES,
        "audio_encoder": ENCODE_AUDIO_BYTES,
        "text_encoder": encode_bytes(USUAL_TEXT_ROWS),
        "dit": rows * DiTConfig().bytes_per_row(2),
        "video_decoder": decode_video_bytes(request),
        "audio_decoder": decode_audio_bytes(request),
    }
    needs = [
        Need(stage=part, part=part, weight_bytes=sizes[part], working_bytes=work[part], setup_bytes=0) for part in work
    ]
    needs[3] = replace(needs[3], setup_bytes=layer_bytes(modulator))
    return plan_memory(needs, capacity_bytes, 100 * timestep_bytes(modulator))


@pytest.mark.parametrize("num_frames", [124, 243, 362])
def test_release_is_resident_as_a_whole_on_one_gpu_of_141_gb(release, num_frames):
    plan = release_plan(release, num_frames, 139 * GIB)
    assert plan.fits
    assert plan.leaving == frozenset()


def test_release_peaks_below_122_gib_at_10_s(release):
    assert release_plan(release, 243, None).peak_bytes < 122 * GIB


def test_release_reads_the_encoder_again_in_every_job_on_a_gpu_of_80_gb(release):
    plan = release_plan(release, 124, 79 * GIB)
    assert plan.fits
    assert {"text_encoder", "dit"} <= plan.leaving


def test_sizes_of_the_release_are_those_of_its_modules(release):
    sizes, modulator = dict(release[0]), release[1]
    assert sizes.pop("dit") == DIT_BYTES
    assert sizes.pop("text_encoder") == TEXT_ENCODER_BYTES
    assert sum(sizes.values()) == VAE_BYTES
    assert num_bytes(modulator) == MODULATOR_BYTES
    assert 100 * timestep_bytes(modulator) == TABLES_BYTES


@pytest.mark.parametrize("num_frames", [243, 362])
def test_estimate_of_a_job_that_keeps_all_is_the_plan_of_it(release, num_frames):
    prompt = USUAL_TEXT_ROWS * DiTConfig().bytes_per_row(2)
    assert estimate(1344, 768, num_frames).resident_bytes == release_plan(release, num_frames, None).peak_bytes - prompt
