"""A clip comes to 24 frames a second on its own canvas, as in diffusers; cancelling closes it."""

import math
import os
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media.clips import FileClip, MemoryClip
from comfyui_h3.h3core.media.conform import check_reference_frames, conform, vae_frames
from comfyui_h3.tests.h3core.media.clip_files import (
    BAR_S,
    EDGE,
    RATES,
    SLOT_S,
    bar_at,
    bar_file,
    bar_pixels,
    times_shown,
    write_clip,
)


@pytest.mark.parametrize("rate", RATES, ids=lambda rate: f"{float(rate):.2f}")
def test_frame_k_shows_time_k_over_24(tmp_path, container, rate):
    clip = FileClip(bar_file(tmp_path, rate, name=f"bar.{container}"))
    frames = conform(clip, max_frames=1000, short_edge=EDGE)
    num_frames = math.ceil(2 * rate)
    assert len(frames) == math.floor(num_frames * 24 / rate + Fraction(1, 2))
    # The rule rounds to the nearest slot: half a slot off at most, which is less than a frame up to 48 fps.
    allowed = max(1 / float(rate), SLOT_S / 2) + BAR_S
    assert max(abs(time - index * SLOT_S) for index, time in enumerate(times_shown(frames))) < allowed


@pytest.mark.oracle
@pytest.mark.parametrize(
    "rate", [*RATES, Fraction(12), Fraction(48), Fraction(16)], ids=lambda rate: f"{float(rate):.2f}"
)
def test_frames_are_those_of_diffusers(tmp_path, rate):
    from diffusers.modular_pipelines.minimax_h3.before_encoder import MiniMaxH3Ref2VASetupStep

    pixels = bar_pixels(rate, math.ceil(2 * rate))
    for max_frames in (1000, 22):
        theirs = MiniMaxH3Ref2VASetupStep._normalize_video_condition(
            pixels.numpy(), float(rate), max_frames, 32, EDGE, 768 * 1344, 24.0
        )
        ours = conform(MemoryClip(pixels, rate), max_frames=max_frames, short_edge=EDGE)
        assert torch.equal(ours, torch.from_numpy(theirs))
        from_file = conform(FileClip(bar_file(tmp_path, rate, name="bar.mkv")), max_frames=max_frames, short_edge=EDGE)
        assert len(from_file) == len(ours)
        assert (from_file.int() - ours.int()).abs().max() <= 3  # lossless, but through YUV


@pytest.mark.oracle
@pytest.mark.parametrize("size", [(100, 60), (50, 90), (768, 1344)])
def test_the_canvas_and_its_pixels_are_those_of_diffusers(size):
    from diffusers.modular_pipelines.minimax_h3.before_encoder import MiniMaxH3Ref2VASetupStep

    pixels = torch.randint(256, (2, *size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    theirs = MiniMaxH3Ref2VASetupStep._normalize_video_condition(pixels.numpy(), 24.0, 9, 32, 768, 768 * 1344, 24.0)
    assert torch.equal(conform(MemoryClip(pixels, Fraction(24)), max_frames=9), torch.from_numpy(theirs))


def test_a_variable_rate_follows_the_timestamps(tmp_path, container):
    # 10 frames of 20 ms, then one of 500 ms, then 30 of 33 ms, then 20 of 70 ms
    lengths = [20] * 10 + [500] + [33] * 30 + [70] * 20
    times = np.concatenate([[0], np.cumsum(lengths)[:-1]]).tolist()
    path = write_clip(
        tmp_path / f"variable.{container}",
        (bar_at(time / 1000) for time in times),
        rate=30,
        times=times,
        time_base=Fraction(1, 1000),
    )
    frames = conform(FileClip(path), max_frames=1000, short_edge=EDGE)
    starts = np.array(times) / 1000
    slots = np.floor(starts * 24 + 0.5)
    for index, shown in enumerate(times_shown(frames)):
        assert abs(shown - starts[slots <= index][-1]) < BAR_S
    assert slots[-1] < len(frames) <= slots[-1] + 2  # the file does not hold the length of its last frame


def test_decoding_stops_when_the_clip_is_full(tmp_path):
    seen = []
    frames = conform(
        FileClip(bar_file(tmp_path, Fraction(60), seconds=4)),
        max_frames=22,
        short_edge=EDGE,
        on_frame=lambda done, total: seen.append((done, total)),
    )
    assert len(frames) == 22
    assert seen[0] == (0, 22)
    assert seen[-1] == (22, 22)
    assert len(seen) < 22 * 60 / 24 + 3


@pytest.mark.parametrize(("rate", "num_converted"), [(60, 36), (24, 36), (12, 18)])
def test_only_frames_that_are_shown_are_converted(rate, num_converted):
    converted = []

    class Watched(MemoryClip):
        def frames(self, on_skip=None):
            for frame in super().frames(on_skip):
                yield replace(frame, convert=lambda frame=frame: converted.append(frame.start) or frame.pixels)

    conform(Watched(bar_pixels(rate, rate * 3 // 2), Fraction(rate)), max_frames=100, short_edge=EDGE)
    assert len(set(converted)) == len(converted) == num_converted


def test_a_clip_longer_than_it_states_is_read_to_its_end(tmp_path):
    class Modest(MemoryClip):
        @property
        def info(self):
            return replace(super().info, duration_s=0.1)

    frames = conform(Modest(bar_pixels(24, 50), Fraction(24)), max_frames=45, short_edge=EDGE)
    assert torch.equal(frames, bar_pixels(24, 45))


def test_a_clip_shorter_than_it_states_keeps_no_more_memory(tmp_path):
    class Boastful(MemoryClip):
        @property
        def info(self):
            return replace(super().info, duration_s=100.0)

    frames = conform(Boastful(bar_pixels(24, 10), Fraction(24)), max_frames=362, short_edge=EDGE)
    assert len(frames) == 10
    assert frames.untyped_storage().nbytes() == frames.nbytes


def test_a_clip_longer_than_4_to_1_is_refused(tmp_path):
    path = write_clip(tmp_path / "long.mp4", [np.zeros((16, 128, 3), np.uint8)] * 3)
    with pytest.raises(RequestError, match="reference video is 128x16, longer than 4:1"):
        conform(FileClip(path), max_frames=9)


@pytest.mark.parametrize("short_edge", ["64", None, math.nan, True, 31, 4097])
def test_an_impossible_short_edge_is_refused(short_edge):
    with pytest.raises(RequestError, match=r"short_edge=.* is not possible; use 32 to 4096 pixels"):
        conform(MemoryClip(bar_pixels(24, 30), Fraction(24)), max_frames=9, short_edge=short_edge)


def test_a_clip_of_no_frame_is_refused():
    with pytest.raises(RequestError, match="shorter than one frame"):
        conform(MemoryClip(bar_pixels(60, 1), Fraction(60)), max_frames=9)


class Cancelled(BaseException):
    pass


@pytest.mark.parametrize("at", [0, 5])
def test_cancel_passes_through_and_closes_the_clip(at):
    closed = []

    class Watched(MemoryClip):
        def frames(self, on_skip=None):
            try:
                yield from super().frames(on_skip)
            finally:
                closed.append(True)

    def cancel(done, total):
        if done == at:
            raise Cancelled

    with pytest.raises(Cancelled):
        conform(Watched(bar_pixels(24, 30), Fraction(24)), max_frames=22, short_edge=EDGE, on_frame=cancel)
    assert closed == ([True] if at else [])


def test_cancel_closes_the_file(tmp_path):
    path = bar_file(tmp_path, Fraction(24), 1.0)

    def cancel(done, total):
        assert path in open_files()
        raise Cancelled

    with pytest.raises(Cancelled):
        conform(
            FileClip(path), max_frames=22, short_edge=EDGE, on_frame=lambda done, total: done and cancel(done, total)
        )
    assert path not in open_files()


def open_files():
    links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    return [Path(os.readlink(link)) for link in links if link.is_symlink()]


@pytest.mark.parametrize(("num_frames", "expected"), [(22, 22), (38, 22), (39, 39), (100, 90), (107, 107), (362, 362)])
def test_the_vae_reads_whole_latent_frames(num_frames, expected):
    assert vae_frames(num_frames) == expected


def test_a_reference_needs_22_frames():
    check_reference_frames(22)
    with pytest.raises(RequestError, match=r"at least 22 frames at 24 fps \(0\.92 s\), this one has 21"):
        check_reference_frames(21)
