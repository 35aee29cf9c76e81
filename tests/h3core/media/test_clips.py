"""Clips keep their clock, their orientation and their colours; what cannot be used is refused by name."""

import gc
import io
import logging
import math
import os
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media.clips import (
    FileClip,
    MemoryClip,
    check_reference_frames,
    conform,
    encoder_frames,
    vae_frames,
)
from comfyui_h3.h3core.types import Audio
from comfyui_h3.tests.h3core.media.clip_files import HEIGHT, WIDTH, bar_at, corners, time_of, write_clip

NTSC_FILM, NTSC = Fraction(24000, 1001), Fraction(30000, 1001)
RATES = [NTSC_FILM, Fraction(24), Fraction(25), NTSC, Fraction(30), Fraction(50), Fraction(60)]
EDGE = 64  # short edge of the canvas in tests: that of the bar's own 4:1 picture
BAR_S = 0.002  # how exactly a bar tells the time: an eighth of a pixel
SLOT_S = 1 / 24


@pytest.fixture(params=["mp4", "mkv"])
def container(request):
    return request.param


def bar_file(folder, rate, seconds=2.0, name="bar.mp4", **options):
    num_frames = math.ceil(seconds * rate)
    return write_clip(folder / name, (bar_at(index / rate) for index in range(num_frames)), rate=rate, **options)


def bar_pixels(rate, num_frames):
    return torch.from_numpy(np.stack([bar_at(index / Fraction(rate)) for index in range(num_frames)]))


def times_shown(frames):
    return [time_of(frame.numpy()) for frame in frames]


# The clock


@pytest.mark.parametrize("rate", RATES, ids=lambda rate: f"{float(rate):.2f}")
def test_frame_k_shows_time_k_over_24(tmp_path, container, rate):
    clip = FileClip(bar_file(tmp_path, rate, name=f"bar.{container}"))
    frames = conform(clip, max_frames=1000, short_edge=EDGE)
    num_frames = math.ceil(2 * rate)
    assert len(frames) == math.floor(num_frames * 24 / rate + Fraction(1, 2))
    # The rule rounds to the nearest slot: half a slot off at most, which is less than a frame up to 48 fps.
    allowed = max(1 / float(rate), SLOT_S / 2) + BAR_S
    assert max(abs(time - index * SLOT_S) for index, time in enumerate(times_shown(frames))) < allowed


@pytest.mark.parametrize("rate", RATES, ids=lambda rate: f"{float(rate):.2f}")
def test_times_of_a_constant_rate_are_exact(tmp_path, container, rate):
    # Matroska holds milliseconds.
    frames = FileClip(bar_file(tmp_path, rate, seconds=4.0, name=f"bar.{container}")).frames()
    assert [(frame.start, frame.end) for frame in frames] == [
        (index / rate, (index + 1) / rate) for index in range(math.ceil(4 * rate))
    ]


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


def test_duplicate_and_backward_times_do_not_disturb(tmp_path):
    times = [0, 40, 40, 80, 60, 120, 400, 440]  # milliseconds
    path = tmp_path / "odd.mkv"
    with av.open(str(path), "w") as output:
        stream = output.add_stream("ffv1", rate=25)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "bgr0"
        for index, time in enumerate(times):
            for packet in stream.encode(av.VideoFrame.from_ndarray(bar_at(index / 25))):
                packet.pts, packet.dts, packet.time_base = time, index, Fraction(1, 1000)
                output.mux(packet)
    frames = list(FileClip(path).frames())
    assert [round(frame.start * 1000) for frame in frames] == [0, 40, 40, 80, 80, 120, 400, 440]
    assert all(one.end == other.start for one, other in pairwise(frames))
    shown = times_shown(conform(FileClip(path), max_frames=100, short_edge=EDGE))
    assert [round(25 * time) for time in shown] == [0, 2, 4, 5, *[5] * 6, 6, 7]


def test_an_avi_without_timestamps_keeps_its_order(tmp_path):
    path = bar_file(tmp_path, Fraction(25), name="bar.avi", pix_fmt="yuv420p")  # B frames: out of order in the file
    frames = list(FileClip(path).frames())
    assert [frame.start for frame in frames] == [Fraction(index, 25) for index in range(50)]
    assert max(abs(time_of(frame.pixels) - float(frame.start)) for frame in frames) < BAR_S


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


def test_frames_that_were_read_are_let_go_at_once(tmp_path):
    clip = FileClip(bar_file(tmp_path, Fraction(24), 1.0))
    gc.collect()
    gc.disable()  # a frame in a circle of references would wait for it, with its pixels
    try:
        assert sum(1 for _ in clip.frames()) == 24
        held = sum(type(thing) is av.VideoFrame for thing in gc.get_objects())
    finally:
        gc.enable()
    assert held <= 1  # the first one, asked how it is turned


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


# The window


@pytest.mark.parametrize("start_s", [0.0, 0.5, 1.01, 2.9])
def test_a_window_starts_with_the_first_frame_in_it(tmp_path, container, start_s):
    path = bar_file(tmp_path, Fraction(30), seconds=3.5, name=f"bar.{container}")
    first = math.ceil(start_s * 30) / 30
    for frames in (
        conform(FileClip(path, start_s=start_s), max_frames=9, short_edge=EDGE),
        conform(FileClip(path), max_frames=9, start_s=start_s, short_edge=EDGE),
        conform(MemoryClip(bar_pixels(30, 105), Fraction(30)), max_frames=9, start_s=start_s, short_edge=EDGE),
    ):
        assert abs(times_shown(frames)[0] - first) < BAR_S
        assert max(abs(time - first - k / 24) for k, time in enumerate(times_shown(frames))) < 1 / 30 + BAR_S


def test_a_window_ends_after_its_duration(tmp_path):
    path = bar_file(tmp_path, Fraction(30), seconds=3)
    clip = FileClip(path, start_s=1.0, duration_s=1.5)
    assert clip.info.duration_s == pytest.approx(1.5)
    frames = list(clip.frames())
    assert (len(frames), frames[0].start, frames[-1].end) == (45, 0, Fraction(3, 2))
    assert len(conform(clip, max_frames=100, short_edge=EDGE)) == 36
    assert len(conform(clip, max_frames=100, start_s=1.0, short_edge=EDGE)) == 12
    memory = MemoryClip(bar_pixels(30, 90), Fraction(30)).trimmed(1.0, 1.5)
    assert len(conform(memory, max_frames=100, short_edge=EDGE)) == 36


@pytest.mark.parametrize("start_s", [2.0, 100.0])
def test_a_start_past_the_end_is_refused_with_the_length(tmp_path, start_s):
    for clip in (FileClip(bar_file(tmp_path, Fraction(30))), MemoryClip(bar_pixels(30, 60), Fraction(30))):
        with pytest.raises(RequestError, match=rf"start at {start_s:g} s is past the last frame of .* 2 s long"):
            conform(clip, max_frames=9, start_s=start_s)


@pytest.mark.parametrize("window", [{"start_s": -1.0}, {"start_s": math.nan}, {"duration_s": 0.0}])
def test_an_impossible_window_is_refused(window):
    with pytest.raises(RequestError, match="not possible"):
        FileClip("clip.mp4", **window)


# Geometry


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_a_turned_file_is_upright(tmp_path, turns):
    path = write_clip(tmp_path / "turned.mp4", [corners()] * 3, rotation=-90 * turns)  # FFmpeg counts to the left
    clip = FileClip(path)
    expected = np.rot90(corners(), -turns)
    pixels = next(clip.frames()).pixels
    assert pixels.shape == expected.shape
    assert np.abs(pixels.astype(int) - expected).max() < 4
    assert (clip.info.height, clip.info.width) == expected.shape[:2]


@pytest.mark.parametrize(
    ("matrix", "expected"),
    [([-1, 0, 0, 1], np.fliplr), ([1, 0, 0, -1], np.flipud), ([0, 1, 1, 0], lambda pixels: pixels.swapaxes(0, 1))],
)
def test_a_mirrored_file_is_mirrored(tmp_path, matrix, expected):
    a, b, c, d = (value << 16 for value in matrix)
    path = write_clip(tmp_path / "mirrored.mp4", [corners()] * 3, matrix=[a, b, 0, c, d, 0, 0, 0, 1 << 30])
    pixels = next(FileClip(path).frames()).pixels
    assert np.abs(pixels.astype(int) - expected(corners())).max() < 4


@pytest.mark.parametrize(("rotation", "size"), [(None, (128, 48)), (90, (48, 128))])
def test_pixels_that_are_not_square_count_in_the_ratio(tmp_path, rotation, size):
    path = write_clip(tmp_path / "wide.mp4", [corners()] * 3, aspect=Fraction(2), rotation=rotation)
    clip = FileClip(path)
    assert (clip.info.width, clip.info.height) == size
    frames = conform(clip, max_frames=9, short_edge=96)
    assert frames.shape[1:] == ((96, 256, 3) if rotation is None else (256, 96, 3))


@pytest.mark.parametrize("size", [(63, 47), (65, 33), (17, 9)])
def test_odd_sizes_are_taken(tmp_path, size):
    pixels = np.full((size[1], size[0], 3), 200, np.uint8)
    path = write_clip(tmp_path / "odd.mkv", [pixels] * 3, codec="ffv1", pix_fmt="yuv420p")
    clip = FileClip(path)
    assert (clip.info.width, clip.info.height) == size
    assert next(clip.frames()).pixels.shape == (size[1], size[0], 3)


def test_a_clip_longer_than_4_to_1_is_refused(tmp_path):
    path = write_clip(tmp_path / "long.mp4", [np.zeros((16, 128, 3), np.uint8)] * 3)
    with pytest.raises(RequestError, match="reference video is 128x16, longer than 4:1"):
        conform(FileClip(path), max_frames=9)


# Colours


@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuv444p", "yuv420p10le"])
@pytest.mark.parametrize(("matrix", "kr", "kb"), [(1, 0.2126, 0.0722), (6, 0.299, 0.114), (2, 0.299, 0.114)])
@pytest.mark.parametrize("full_range", [False, True])
def test_colours_follow_the_tags(tmp_path, pix_fmt, matrix, kr, kb, full_range):
    colour = np.array([200.0, 60.0, 30.0])
    depth = 4 if "10" in pix_fmt else 1
    luma = np.dot([kr, 1 - kr - kb, kb], colour) / 255
    chroma = [(colour[2] / 255 - luma) / (2 - 2 * kb), (colour[0] / 255 - luma) / (2 - 2 * kr)]
    if full_range:
        codes = [255 * luma, *(128 + 255 * value for value in chroma)]
    else:
        codes = [16 + 219 * luma, *(128 + 224 * value for value in chroma)]
    path = tmp_path / "colour.mkv"
    with av.open(str(path), "w") as output:
        stream = output.add_stream("ffv1", rate=24)
        stream.width, stream.height, stream.pix_fmt = 64, 48, pix_fmt
        stream.codec_context.colorspace, stream.codec_context.color_range = matrix, 2 if full_range else 1
        frame = av.VideoFrame(64, 48, pix_fmt)
        frame.colorspace, frame.color_range = matrix, 2 if full_range else 1
        for plane, code in zip(frame.planes, codes, strict=True):
            kind = np.uint16 if depth > 1 else np.uint8
            plane.update(np.full(plane.buffer_size // kind().itemsize, round(code * depth), kind).tobytes())
        frame.pts = 0
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    pixels = next(FileClip(path).frames()).pixels
    assert np.abs(pixels.reshape(-1, 3) - colour).max() <= 2  # 8-bit codes are worth up to 1.9 steps of red or blue


def test_gray_becomes_three_equal_channels(tmp_path):
    path = write_clip(tmp_path / "gray.mkv", [np.full((48, 64), 99, np.uint8)] * 2, codec="ffv1", pix_fmt="gray")
    assert np.unique(next(FileClip(path).frames()).pixels).tolist() == [99]


def test_transparent_parts_are_put_on_white(tmp_path):
    pixels = np.zeros((48, 64, 4), np.uint8)
    pixels[:, 32:] = (10, 20, 30, 255)
    path = write_clip(tmp_path / "alpha.mkv", [pixels] * 2, codec="ffv1", pix_fmt="bgra")
    shown = next(FileClip(path).frames()).pixels
    assert shown[0, 0].tolist() == [255, 255, 255]
    assert shown[0, 63].tolist() == [10, 20, 30]


# In memory


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_frames_in_memory_are_read_like_pictures(channels):
    pixels = torch.full((30, 48, 64, channels), 0.5)
    pixels[..., -1] = 1.0
    frames = conform(MemoryClip(pixels, Fraction(24)), max_frames=25, short_edge=96)
    assert frames.shape == (25, 96, 128, 3)
    assert frames.unique().tolist() == [255] if channels == 1 else [128, 255]


@pytest.mark.parametrize("pixels", [torch.zeros(48, 64, 3), torch.zeros(0, 48, 64, 3)])
def test_frames_of_another_shape_are_refused(pixels):
    with pytest.raises(RequestError, match=r"frames, height, width, channels"):
        MemoryClip(pixels, Fraction(24))


@pytest.mark.parametrize("fps", [Fraction(0), Fraction(-24), math.nan, math.inf])
def test_an_impossible_rate_is_refused(fps):
    with pytest.raises(RequestError, match="frames per second is not possible"):
        MemoryClip(torch.zeros(2, 4, 4, 3), fps)


def test_nan_in_a_frame_is_refused_with_its_number():
    pixels = torch.zeros(5, 32, 32, 3)
    pixels[3, 0, 0, 0] = math.nan
    with pytest.raises(RequestError, match="frame 3 of the video holds NaN"):
        conform(MemoryClip(pixels, Fraction(24)), max_frames=9, short_edge=EDGE)


# Sound


def click_at(seconds, rate=48000, length_s=2.0, num_channels=2):
    """Silence, then full sound from ``seconds`` on."""
    sound = np.zeros((num_channels, round(rate * length_s)), np.float32)
    sound[:, round(rate * seconds) :] = 0.5
    return sound


def onset_s(audio):
    return int((audio.samples[0].abs() > 0.2).nonzero()[0]) / audio.sample_rate


@pytest.mark.parametrize("sound_start_s", [Fraction(0), Fraction(1, 4), Fraction(3, 2)])
@pytest.mark.parametrize("start_s", [0.0, 0.5])
def test_sound_stays_beside_its_picture(tmp_path, container, sound_start_s, start_s):
    # The sound of the file begins late, and in it something happens after another 0.3 s.
    path = bar_file(tmp_path, Fraction(30), 3.0, f"sound.{container}", sound=click_at(0.3), sound_start_s=sound_start_s)
    clip = FileClip(path, start_s=start_s)
    audio = clip.sound(10.0)
    assert audio.sample_rate == 44100
    assert audio.samples.shape[0] == 2
    expected = float(sound_start_s) + 0.3 - start_s
    assert abs(onset_s(audio) - max(0.0, expected)) < 0.005 if expected > 0 else onset_s(audio) == 0


def test_sound_far_into_a_file_stays_beside_its_picture(tmp_path, container):
    path = bar_file(tmp_path, Fraction(30), 3.9, f"sound.{container}", sound=click_at(3.1, length_s=3.9))
    assert onset_s(FileClip(path).sound(10.0, start_s=3.0)) == pytest.approx(0.1, abs=0.005)


def test_sound_is_cut_to_whole_samples(tmp_path):
    path = bar_file(tmp_path, Fraction(30), 2.0, "sound.mkv", sound=click_at(0.1))
    assert FileClip(path).sound(1.23456).samples.shape == (2, int(1.23456 * 44100))
    assert FileClip(path, start_s=1.0, duration_s=0.5).sound(9.0).samples.shape == (2, 22050)
    assert abs(FileClip(path).sound(9.0).samples.shape[1] - 2 * 44100) < 20


def test_a_hole_in_the_sound_is_silent(tmp_path):
    path = tmp_path / "hole.mkv"
    with av.open(str(path), "w") as output:
        video = output.add_stream("ffv1", rate=24)
        video.width, video.height, video.pix_fmt = 64, 48, "bgr0"
        track = output.add_stream("pcm_f32le", rate=44100, layout="stereo")
        for index in range(24):
            frame = av.VideoFrame.from_ndarray(corners())
            frame.pts = index
            output.mux(video.encode(frame))
        for index in (0, 1, 2, 3, 20, 21):  # pieces of 1024 samples, 0.37 s are missing
            piece = av.AudioFrame.from_ndarray(np.full((1, 2048), 0.5, np.float32), format="flt", layout="stereo")
            piece.sample_rate, piece.time_base, piece.pts = 44100, Fraction(1, 44100), index * 1024
            output.mux(track.encode(piece))
        output.mux(video.encode(None))
        output.mux(track.encode(None))
    samples = FileClip(path).sound(5.0).samples[0]
    assert abs(len(samples) - 22 * 1024) < 50
    assert samples[: 4 * 1024].min() > 0.4
    assert samples[5 * 1024 : 19 * 1024].abs().max() == 0
    assert samples[-1024:].min() > 0.4


def test_a_file_without_sound_has_none(tmp_path):
    clip = FileClip(bar_file(tmp_path, Fraction(24), 0.5))
    assert not clip.info.has_sound
    assert clip.sound(5.0) is None


def test_sound_that_ends_before_the_window_counts_as_none(tmp_path, caplog):
    path = bar_file(tmp_path, Fraction(24), 3.0, "sound.mkv", sound=click_at(0.1, length_s=1.0))
    with caplog.at_level(logging.WARNING):
        assert FileClip(path, start_s=2.0).sound(5.0) is None
    assert "sound.mkv" in caplog.text


def test_sound_in_memory_stays_as_it_is_and_is_cut():
    audio = Audio(samples=torch.rand(1, 48000, generator=torch.Generator().manual_seed(0)), sample_rate=48000)
    clip = MemoryClip(bar_pixels(24, 24), Fraction(24), audio)
    sound = clip.sound(0.5)
    assert sound.sample_rate == 48000
    assert torch.equal(sound.samples, audio.samples[:, :24000])
    assert torch.equal(clip.sound(0.25, start_s=0.5).samples, audio.samples[:, 24000:36000])


# What a clip is, and what it must not be


def test_what_a_file_is_can_be_asked(tmp_path):
    path = bar_file(tmp_path, NTSC, 2.0, sound=click_at(0.1))
    info = FileClip(path).info
    assert (info.width, info.height, info.fps) == (WIDTH, HEIGHT, NTSC)
    assert info.duration_s == pytest.approx(60 / float(NTSC))
    assert (info.has_sound, info.num_bytes) == (True, path.stat().st_size)
    assert (info.video_codec, info.audio_codec) == ("h264", "aac")
    assert "mp4" in info.container


@pytest.mark.parametrize("kind", ["bytes", "stream"])
def test_a_file_in_memory_is_read_like_one_on_disk(tmp_path, kind):
    path = bar_file(tmp_path, Fraction(30), 1.0, sound=click_at(0.1))
    data = path.read_bytes()
    clip = FileClip(data if kind == "bytes" else io.BytesIO(data))
    assert torch.equal(
        conform(clip, max_frames=9, start_s=0.5, short_edge=EDGE),
        conform(FileClip(path), max_frames=9, start_s=0.5, short_edge=EDGE),
    )
    assert torch.equal(clip.sound(9.0).samples, FileClip(path).sound(9.0).samples)
    assert clip.info.num_bytes == len(data)


def test_a_file_that_does_not_state_its_length_is_measured(tmp_path):
    path = bar_file(tmp_path, Fraction(25), 2.0, "bar.h264", pix_fmt="yuv420p")
    assert FileClip(path).info.duration_s == pytest.approx(2.0)
    assert len(conform(FileClip(path), max_frames=100, short_edge=EDGE)) == 48


def broken_files(folder):
    """(name, what the message must say) of files that are no video."""
    (folder / "text.mp4").write_text("no video\n" * 1000)
    (folder / "text.txt").write_text("no video\n" * 1000)
    (folder / "empty.mp4").write_bytes(b"")
    (folder / "folder.mp4").mkdir()
    (folder / "list.m3u8").write_text("#EXTM3U\n#EXTINF:1,\nbar.mp4\n#EXT-X-ENDLIST\n")
    (folder / "list.ffconcat").write_text("ffconcat version 1.0\nfile bar.mp4\n")
    whole = bar_file(folder, Fraction(24), 1.0).read_bytes()
    (folder / "no-index.mp4").write_bytes(whole[: len(whole) // 2])
    return ["text.mp4", "text.txt", "empty.mp4", "folder.mp4", "list.m3u8", "list.ffconcat", "no-index.mp4", "none.mp4"]


def test_what_is_no_video_is_refused_by_name(tmp_path):
    for name in broken_files(tmp_path):
        for ask in (lambda clip: clip.info, lambda clip: conform(clip, max_frames=9), lambda clip: clip.sound(1.0)):
            with pytest.raises(RequestError, match=rf"^{name} "):
                ask(FileClip(tmp_path / name))


def test_a_file_with_sound_only_is_refused(tmp_path):
    path = tmp_path / "sound.mkv"
    with av.open(str(path), "w") as output:
        track = output.add_stream("pcm_s16le", rate=44100, layout="stereo")
        piece = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.int16), format="s16", layout="stereo")
        piece.sample_rate, piece.pts = 44100, 0
        output.mux(track.encode(piece))
    with pytest.raises(RequestError, match=r"sound\.mkv has no video stream"):
        conform(FileClip(path), max_frames=9)


def test_a_truncated_file_gives_what_decodes(tmp_path, caplog):
    whole = bar_file(tmp_path, Fraction(24), 3.0, container={"options": {"movflags": "faststart"}})
    path = tmp_path / "cut.mp4"
    path.write_bytes(whole.read_bytes()[: whole.stat().st_size * 2 // 3])
    with caplog.at_level(logging.WARNING):
        frames = conform(FileClip(path), max_frames=100, short_edge=EDGE)
    assert 20 < len(frames) < 72
    assert "cut.mp4" in caplog.text
    assert max(abs(time - index / 24) for index, time in enumerate(times_shown(frames[:-3]))) < SLOT_S


def test_a_file_whose_packets_are_scrambled_is_refused(tmp_path):
    whole = bytearray(bar_file(tmp_path, Fraction(24), 1.0).read_bytes())
    start = whole.index(b"mdat") + 4
    end = whole.index(b"moov") - 4
    whole[start:end] = np.random.default_rng(0).integers(0, 256, end - start, dtype=np.uint8).tobytes()
    with pytest.raises(RequestError, match=r"the video .*damaged or encrypted|no video of the video"):
        conform(FileClip(bytes(whole)), max_frames=9)


class Cancelled(BaseException):
    pass


@pytest.mark.parametrize("at", [0, 5])
def test_cancel_passes_through_and_closes_the_clip(at):
    closed = []

    class Watched(MemoryClip):
        def frames(self):
            try:
                yield from super().frames()
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


def test_a_clip_of_no_frame_is_refused():
    with pytest.raises(RequestError, match="shorter than one frame"):
        conform(MemoryClip(bar_pixels(60, 1), Fraction(60)), max_frames=9)


# What the encoders read


@pytest.mark.parametrize(("num_frames", "expected"), [(22, 22), (38, 22), (39, 39), (100, 90), (107, 107), (362, 362)])
def test_the_vae_reads_whole_latent_frames(num_frames, expected):
    assert vae_frames(num_frames) == expected


def test_a_reference_needs_22_frames():
    check_reference_frames(22)
    with pytest.raises(RequestError, match=r"at least 22 frames at 24 fps \(0\.92 s\), this one has 21"):
        check_reference_frames(21)


@pytest.mark.parametrize(
    ("num_frames", "num_sampled", "shown"),
    [
        (107, 9, ["0.2", "1.2", "2.2", "3.2", "4.0"]),
        (124, 11, ["0.2", "1.2", "2.2", "3.2", "4.2", "5.0"]),
        (22, 2, ["0.2"]),
        (13, 2, ["0.2"]),
    ],
)
def test_the_encoder_sees_two_frames_a_second(num_frames, num_sampled, shown):
    frames = torch.arange(num_frames)[:, None]
    sampled, times = encoder_frames(frames)
    assert sampled[:, 0].tolist() == list(range(0, num_frames, 12))
    assert len(sampled) == num_sampled
    assert [f"{time:.1f}" for time in times] == shown
