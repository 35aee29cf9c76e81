"""Clips keep their clock and their window; what cannot be used is refused by name, what is odd is noticed."""

import gc
import io
import logging
import math
import re
from fractions import Fraction
from itertools import pairwise

import av
import numpy as np
import pytest
import torch

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media.clips import FileClip, MemoryClip
from comfyui_h3.h3core.media.conform import conform
from comfyui_h3.tests.h3core.media.clip_files import (
    BAR_S,
    EDGE,
    HEIGHT,
    NTSC,
    RATES,
    SLOT_S,
    WIDTH,
    bar_at,
    bar_file,
    bar_pixels,
    click_at,
    time_of,
    times_shown,
)


@pytest.mark.parametrize("rate", RATES, ids=lambda rate: f"{float(rate):.2f}")
def test_times_of_a_constant_rate_are_exact(tmp_path, container, rate):
    # Matroska holds milliseconds.
    frames = FileClip(bar_file(tmp_path, rate, seconds=4.0, name=f"bar.{container}")).frames()
    assert [(frame.start, frame.end) for frame in frames] == [
        (index / rate, (index + 1) / rate) for index in range(math.ceil(4 * rate))
    ]


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


def test_frames_that_were_read_are_let_go_at_once(tmp_path):
    clip = FileClip(bar_file(tmp_path, Fraction(24), 1.0))
    gc.collect()
    gc.disable()  # a frame in a circle of references would wait for it, with its pixels
    try:
        assert sum(frame.pixels.size > 0 for frame in clip.frames()) == 24
        held = sum(type(thing) is av.VideoFrame for thing in gc.get_objects())
    finally:
        gc.enable()
    assert held <= 1  # the first one, asked how it is turned


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


@pytest.mark.parametrize("rate", [10, 24, 25, 30, 50, 60])
def test_a_start_at_a_frame_is_that_frame(tmp_path, container, rate):
    # Floats lie beside tenths and thirds: 0.1 * 30 is a little more than 3, and 0.1 + 0.2 more than 0.3.
    clips = (
        FileClip(bar_file(tmp_path, Fraction(rate), 1.1, f"bar.{container}")),
        MemoryClip(bar_pixels(rate, math.ceil(1.1 * rate)), Fraction(rate)),
    )
    for clip in clips:
        for tenth in range(1, 10):
            shown = time_of(next(clip.trimmed(tenth / 10).frames()).pixels)
            assert abs(shown - math.ceil(Fraction(tenth, 10) * rate) / rate) < BAR_S
        for frame in range(1, rate, 7):
            assert abs(time_of(next(clip.trimmed(frame / rate).frames()).pixels) - frame / rate) < BAR_S
        twice = clip.trimmed(0.1).trimmed(0.2)
        expected = Fraction(3, 10) if clip is clips[0] else Fraction(math.ceil(rate / 10) + math.ceil(rate / 5), rate)
        assert abs(time_of(next(twice.frames()).pixels) - math.ceil(expected * rate) / rate) < BAR_S
        assert len(list(clip.trimmed(0.2, 0.1).frames())) == math.ceil(Fraction(3 * rate, 10)) - math.ceil(rate / 5)


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


@pytest.mark.parametrize(
    "window",
    [
        {"start_s": -1.0},
        {"start_s": math.nan},
        {"start_s": "0.5"},
        {"start_s": None},
        {"start_s": True},
        {"start_s": 10**400},
        {"start_s": 1.0, "duration_s": 0.0},
        {"start_s": 1.0, "duration_s": "1"},
    ],
    ids=str,
)
def test_an_impossible_window_is_refused(window):
    memory = MemoryClip(bar_pixels(24, 48), Fraction(24))
    for trim in (lambda: FileClip("clip.mp4", **window), lambda: memory.trimmed(**window)):
        with pytest.raises(RequestError, match="not possible"):
            trim()
    if "duration_s" not in window:
        for read in (lambda: memory.sound(1.0, **window), lambda: conform(memory, max_frames=9, **window)):
            with pytest.raises(RequestError, match="not possible"):
                read()


def test_numbers_of_numpy_are_numbers(tmp_path):
    clip = FileClip(bar_file(tmp_path, Fraction(25)), start_s=np.float32(0.5), duration_s=np.int64(1))
    assert clip.info.duration_s == 1.0
    assert MemoryClip(torch.zeros(50, 4, 4, 3), np.float32(25)).trimmed(np.float64(1.0)).info.duration_s == 1.0


def test_a_stream_that_cannot_be_read_is_refused():
    closed = io.BytesIO(b"video")
    closed.close()
    with pytest.raises(RequestError, match="cannot be read from its stream"):
        FileClip(closed)


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


@pytest.mark.parametrize("fps", [Fraction(0), Fraction(-24), math.nan, math.inf, Fraction(1, 10**6), 1001, "24", None])
def test_an_impossible_rate_is_refused(fps):
    with pytest.raises(RequestError, match="frames per second is not possible"):
        MemoryClip(torch.zeros(2, 4, 4, 3), fps)


def test_nan_in_a_frame_is_refused_with_its_number():
    pixels = torch.zeros(5, 32, 32, 3)
    pixels[3, 0, 0, 0] = math.nan
    with pytest.raises(RequestError, match="frame 3 of the video holds NaN"):
        conform(MemoryClip(pixels, Fraction(24)), max_frames=9, short_edge=EDGE)


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


def test_a_truncated_file_gives_what_decodes(tmp_path):
    whole = bar_file(tmp_path, Fraction(24), 3.0, container={"options": {"movflags": "faststart"}})
    path = tmp_path / "cut.mp4"
    path.write_bytes(whole.read_bytes()[: whole.stat().st_size * 2 // 3])
    clip = FileClip(path)
    frames = conform(clip, max_frames=100, short_edge=EDGE)
    assert 20 < len(frames) < 72
    assert any("cut.mp4 ends after" in notice and "damaged or cut off" in notice for notice in clip.notices)
    assert max(abs(time - index / 24) for index, time in enumerate(times_shown(frames[:-3]))) < SLOT_S


def test_a_file_whose_packets_are_scrambled_is_refused(tmp_path):
    whole = bytearray(bar_file(tmp_path, Fraction(24), 1.0).read_bytes())
    start = whole.index(b"mdat") + 4
    end = whole.index(b"moov") - 4
    whole[start:end] = np.random.default_rng(0).integers(0, 256, end - start, dtype=np.uint8).tobytes()
    with pytest.raises(RequestError, match=r"the video .*damaged or encrypted|no video of the video"):
        conform(FileClip(bytes(whole)), max_frames=9)


def test_a_damaged_part_is_noticed_by_who_stops_behind_it(tmp_path):
    whole = bytearray(bar_file(tmp_path, Fraction(24), 3.0).read_bytes())
    middle = whole.index(b"mdat") + len(whole) // 4
    whole[middle : middle + 400] = np.random.default_rng(0).integers(0, 256, 400, dtype=np.uint8).tobytes()
    clip = FileClip(bytes(whole))
    conform(clip, max_frames=40, short_edge=EDGE)
    assert len(clip.notices) == 1
    assert re.fullmatch(r"the video is damaged \(.*\): its pictures are those that decode", clip.notices[0])


def test_a_notice_is_there_once_and_logged(tmp_path, caplog):
    path = tmp_path / "hdr.mkv"
    with av.open(str(path), "w") as output:
        stream = output.add_stream("ffv1", rate=24)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "bgra"
        stream.codec_context.color_trc = 16
        for _ in range(30):
            output.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((48, 64, 4), np.uint8), format="bgra")))
        output.mux(stream.encode(None))
    clip = FileClip(path)
    assert clip.notices == ()
    with caplog.at_level(logging.WARNING):
        for start_s in (0.0, 0.5, 0.5):
            conform(clip, max_frames=9, start_s=start_s, short_edge=EDGE)
    assert clip.notices == (
        "hdr.mkv is HDR (PQ), which is not tone-mapped: its colours look flat",
        "hdr.mkv is partly transparent; it is put on white",
    )
    assert set(caplog.messages) == set(clip.notices)


def test_a_sound_file_has_nothing_to_notice(tmp_path):
    clip = FileClip(bar_file(tmp_path, Fraction(24), 2.0, sound=click_at(0.1)))
    conform(clip, max_frames=22, short_edge=EDGE)
    clip.sound(1.0)
    assert clip.notices == ()


@pytest.mark.parametrize(("value", "alpha", "words"), [(1.5, 1.0, "clipped to 0..1"), (0.5, 0.5, "put on white")])
def test_what_is_changed_in_frames_in_memory_is_noticed_once(value, alpha, words):
    pixels = torch.full((30, 32, 32, 4), 0.5)
    pixels[..., 3] = 1
    pixels[3:, ..., :3], pixels[3:, ..., 3] = value, alpha
    clip = MemoryClip(pixels, Fraction(24))
    conform(clip, max_frames=22, start_s=1 / 24, short_edge=EDGE)
    (notice,) = clip.notices
    assert notice.startswith("frame 2 of the video ")
    assert notice.endswith(f"{words}; the other frames are treated alike")
