"""A clip begins with the first frame at or after its start in every container; it is read once, and anew if changed."""

import os
from fractions import Fraction

import numpy as np
import pytest

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media import conform as conform_module
from comfyui_h3.h3core.media import decode
from comfyui_h3.h3core.media.clips import FileClip
from comfyui_h3.h3core.media.conform import conform
from comfyui_h3.h3core.media.seconds import exact_seconds
from comfyui_h3.tests.h3core.media.clip_files import EDGE, bar_at, bar_file, click_at, write_clip

B_FRAMES = {"bf": "2", "preset": "ultrafast", "x264-params": "scenecut=0"}


def gops_of(num_frames):
    return {**B_FRAMES, "g": str(num_frames)}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("short-gop.ts", gops_of(24)),
        ("long-gop.ts", gops_of(100)),  # the second key frame, where a seek lands, is 4 s late
        ("one-gop.ts", gops_of(1000)),
        ("open-gop.ts", {**gops_of(24), "x264-params": "open-gop=1"}),
        ("bare.h264", gops_of(24)),
        ("bar.asf", gops_of(24)),
        ("bar.avi", gops_of(24)),
        ("bar.flv", gops_of(24)),
        ("bar.mkv", gops_of(24)),
        ("bar.mp4", gops_of(100)),
        ("bar.mpg", {"g": "15", "bf": "2"}),
    ],
)
def test_a_clip_begins_with_the_first_frame_at_or_after_its_start(tmp_path, name, options):
    codec = "mpeg2video" if name.endswith("mpg") else "libx264"
    path = bar_file(tmp_path, Fraction(25), 6.0, name, codec=codec, pix_fmt="yuv420p", options=options)
    whole = [(frame.start, frame.pixels) for frame in FileClip(path).frames()]
    assert len(whole) >= 149  # FFmpeg's ASF loses one
    for start_s in (0.1, 1.0, 1.9, 3.3, 5.5):
        wanted = [frame for frame in whole if frame[0] >= exact_seconds(start_s)]
        part = FileClip(path).trimmed(start_s)
        found = [(frame.start, frame.pixels) for frame in part.frames()]
        assert [start for start, _ in found] == [start - wanted[0][0] for start, _ in wanted]
        assert all(np.array_equal(one[1], other[1]) for one, other in zip(found, wanted, strict=True))
        assert part.notices == ()


@pytest.mark.parametrize("name", ["bar.ts", "bar.mpg", "bar.avi"])
def test_sound_begins_with_the_first_frame(tmp_path, name):
    codec = "libx264" if name.endswith("ts") else "mpeg2video"
    options = {"pix_fmt": "yuv420p", "codec": codec, "options": B_FRAMES if codec == "libx264" else {"g": "15"}}
    clip = FileClip(bar_file(tmp_path, Fraction(25), 6.0, name, sound=click_at(5.0, length_s=6.0), **options))
    for start_s in (0.1, 3.3, 4.5):
        sound = clip.sound(6.0, start_s=start_s)
        first = float(next(frame.start for frame in clip.frames() if frame.start >= exact_seconds(start_s)))
        click_s = float((sound.samples[0].abs() > 0.25).int().argmax()) / sound.sample_rate
        assert abs(click_s - (5.0 - first)) < 0.003  # of the codec


def test_a_part_of_a_file_is_found_without_decoding_it_and_read_once(tmp_path, monkeypatch):
    passes = []
    timed_video = decode.timed_video

    def counted(file, from_s, on_skip=None):
        passes.append(float(from_s))
        return timed_video(file, from_s, on_skip)

    monkeypatch.setattr(decode, "timed_video", counted)
    sound = click_at(1.0, length_s=3.0)
    path = bar_file(tmp_path, Fraction(25), 3.0, "bar.avi", codec="mpeg4", pix_fmt="yuv420p", sound=sound)
    clip = FileClip(path)
    assert clip.trimmed(2.0).info.duration_s == pytest.approx(1.0)
    assert passes == []
    conform(clip, max_frames=9, start_s=2.0, short_edge=EDGE)
    assert clip.sound(1.0, start_s=2.0) is not None
    assert passes == [2.0]


class Cancelled(BaseException):
    pass


def test_cancel_acts_while_frames_before_the_start_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(conform_module, "HEARTBEAT_S", 0.0)
    path = bar_file(tmp_path, Fraction(25), 4.0, "bar.avi", codec="mpeg4", pix_fmt="yuv420p")
    seen = []

    def on_frame(done, total):
        seen.append((done, total))
        if len(seen) == 20:
            raise Cancelled

    with pytest.raises(Cancelled):
        conform(FileClip(path), max_frames=22, start_s=3.0, short_edge=EDGE, on_frame=on_frame)
    assert seen == [(0, 22)] * 20
    assert all(os.readlink(f"/proc/self/fd/{name}") != str(path) for name in fds())


def fds():
    return [name for name in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{name}")]


def test_a_start_past_a_stated_length_is_measured(tmp_path):
    path = bar_file(tmp_path, Fraction(25), 4.0, "bar.mpg", codec="mpeg2video", pix_fmt="yuv420p")
    clip = FileClip(path)
    stated_s = clip.info.duration_s
    assert stated_s < 3.9  # FFmpeg's guess for program streams
    assert clip.trimmed(3.92).info.duration_s == pytest.approx(0.08, abs=0.04)
    assert len(list(clip.trimmed(3.92).frames())) == 2
    with pytest.raises(RequestError, match="start at 4 s is past the last frame"):
        conform(clip, max_frames=9, start_s=4.0)


@pytest.mark.parametrize("is_tagged", [True, False])
def test_a_matroska_that_starts_late_is_as_long_as_its_frames(tmp_path, is_tagged):
    times = range(14 * 24, 18 * 24)
    path = write_clip(tmp_path / "late.mkv", (bar_at(time / 24 - 14) for time in times), times=times)
    if not is_tagged:  # as other writers leave it: its header may then state a length or an end
        path.write_bytes(path.read_bytes().replace(b"DURATION", b"SOMETIME"))
    clip = FileClip(path)
    assert clip.info.duration_s == pytest.approx(4.0, abs=0.002)
    assert clip.trimmed(1.0).info.duration_s == pytest.approx(3.0, abs=0.002)
    assert len(list(clip.frames())) == 96
    assert len(list(clip.trimmed(1.0).frames())) == 72
    assert clip.notices == ()


def test_no_damage_is_noticed_at_a_low_rate(tmp_path):
    clip = FileClip(bar_file(tmp_path, Fraction(1), 5.0))
    assert len(list(clip.trimmed(0.1).frames())) == 4
    assert clip.notices == ()


def test_a_file_that_was_replaced_is_found_anew(tmp_path):
    path = bar_file(tmp_path, Fraction(24), 2.0, sound=click_at(0.1))
    clip = FileClip(path)
    part = clip.trimmed(0.5)
    assert part.info.has_sound
    assert part.sound(1.0) is not None
    other = write_clip(tmp_path / "other.mp4", [np.full((96, 64, 3), 128, np.uint8)] * 30)
    other.replace(path)
    assert conform(clip, max_frames=9, start_s=0.5, short_edge=EDGE).shape == (9, 96, 64, 3)
    assert part.sound(1.0) is None
    assert (clip.info.width, clip.info.has_sound, clip.info.num_bytes) == (64, False, path.stat().st_size)
    path.write_bytes(b"no video")
    for _ in range(2):
        with pytest.raises(RequestError, match=r"^bar\.mp4 cannot be read"):
            clip.info  # noqa: B018


def test_a_file_that_was_deleted_is_refused(tmp_path):
    path = bar_file(tmp_path, Fraction(24), 2.0, sound=click_at(0.1))
    clip = FileClip(path)
    assert clip.info.has_sound
    path.unlink()
    for ask in (lambda: clip.info, lambda: conform(clip, max_frames=9), lambda: clip.sound(1.0)):
        with pytest.raises(RequestError, match=r"bar\.mp4 does not exist"):
            ask()


def test_a_clip_has_the_size_of_its_first_frame(tmp_path):
    # Two broadcasts in one file: transport streams can be put one after the other.
    wide = bar_file(tmp_path, Fraction(24), 2.0, "wide.ts", pix_fmt="yuv420p", options=gops_of(24))
    times = range(48, 96)
    tall = write_clip(
        tmp_path / "tall.ts",
        [np.full((96, 64, 3), 128, np.uint8)] * 48,
        times=times,
        pix_fmt="yuv420p",
        options=gops_of(24),
    )
    path = tmp_path / "both.ts"
    path.write_bytes(wide.read_bytes() + tall.read_bytes())
    clip = FileClip(path)
    assert conform(clip, max_frames=22, start_s=2.5, short_edge=EDGE).shape == (22, 96, 64, 3)
    assert clip.notices == ()
    assert conform(clip, max_frames=72, short_edge=EDGE).shape == (72, 64, 256, 3)
    assert clip.notices == ("both.ts changes its size: all frames are brought to that of the first one used",)
