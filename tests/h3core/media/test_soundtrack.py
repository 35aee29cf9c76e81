"""A soundtrack stays beside its picture."""

from fractions import Fraction

import av
import numpy as np
import pytest
import torch

from comfyui_h3.h3core.media.clips import FileClip, MemoryClip
from comfyui_h3.h3core.types import Audio
from comfyui_h3.tests.h3core.media.clip_files import bar_file, bar_pixels, click_at, corners


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


def test_sound_that_ends_before_the_window_counts_as_none(tmp_path):
    clip = FileClip(bar_file(tmp_path, Fraction(24), 3.0, "sound.mkv", sound=click_at(0.1, length_s=1.0)))
    assert clip.sound(5.0, start_s=2.0) is None
    assert clip.notices == ("the soundtrack of sound.mkv is silent where its picture is used: it counts as none",)
    assert clip.sound(5.0) is not None
    assert clip.notices == ()


def test_sound_in_memory_stays_as_it_is_and_is_cut():
    audio = Audio(samples=torch.rand(1, 48000, generator=torch.Generator().manual_seed(0)), sample_rate=48000)
    clip = MemoryClip(bar_pixels(24, 24), Fraction(24), audio)
    sound = clip.sound(0.5)
    assert sound.sample_rate == 48000
    assert torch.equal(sound.samples, audio.samples[:, :24000])
    assert torch.equal(clip.sound(0.25, start_s=0.5).samples, audio.samples[:, 24000:36000])
