"""H3Video against the host's own readers and writers, and foreign videos against ours."""

import inspect
import io
import json
from fractions import Fraction

import av
import pytest
import torch
from comfy_api.latest import Input, InputImpl, Types

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.types import Audio, Frames
from comfyui_h3.nodes import audio as host_audio
from comfyui_h3.nodes.video import H3Video, from_host

NUM_FRAMES, RATE = 22, 32000
HAS_CODEC_OPTIONS = "crf" in inspect.signature(Input.Video.save_to).parameters


def frames(num_frames=NUM_FRAMES):
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(num_frames, 3, 6, 8, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=(48, 64), mode="bilinear")
    return Frames(pixels=(smooth * 255).round().to(torch.uint8).movedim(1, -1).contiguous())


def sound(num_samples=29600):
    t = torch.arange(num_samples) / RATE
    return Audio(samples=0.3 * torch.stack([torch.sin(2000 * t), torch.sin(3000 * t)]))


@pytest.fixture
def video():
    return H3Video(frames(), sound())


def read(source):
    with av.open(source) as file:
        counts = sum(1 for _ in file.decode(video=0))
        return counts, [stream.type for stream in file.streams], dict(file.metadata), file.format.name


def test_components_are_what_the_host_passes_around(video):
    parts = video.get_components()
    assert torch.equal(parts.images, video.frames.pixels.float() / 255)
    assert parts.frame_rate == Fraction(24)
    assert parts.audio["waveform"].shape == (1, 2, 29600)
    assert parts.audio["sample_rate"] == RATE
    assert H3Video(frames()).get_components().audio is None


def test_truncating_savers_get_back_every_code():
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16, 1).expand(-1, -1, -1, 3)
    images = H3Video(Frames(pixels=codes)).get_components().images
    assert torch.equal((images * 255).to(torch.uint8), codes)  # as the host's own nodes convert


def test_facts_need_no_float_frames(video, monkeypatch):
    monkeypatch.setattr(H3Video, "get_components", lambda self: pytest.fail("made all frames"))
    assert video.get_dimensions() == (64, 48)
    assert video.get_frame_count() == NUM_FRAMES
    assert video.get_frame_rate() == Fraction(24)
    assert video.get_duration() == pytest.approx(NUM_FRAMES / 24)
    assert "mp4" in video.get_container_format()


@pytest.mark.parametrize(("format_", "codec"), [("auto", "auto"), ("mp4", "h264"), ("MP4", "AUTO")])
def test_saves_mp4_with_tags(video, tmp_path, format_, codec, monkeypatch):
    monkeypatch.setattr(H3Video, "get_components", lambda self: pytest.fail("went through floats"))
    path = str(tmp_path / "film.mp4")
    video.save_to(path, format=format_, codec=codec, metadata={"prompt": {"1": {}}, "workflow": [1]})
    count, kinds, tags, name = read(path)
    assert (count, kinds) == (NUM_FRAMES, ["video", "audio"])
    assert json.loads(tags["prompt"]) == {"1": {}}
    assert json.loads(tags["workflow"]) == [1]
    assert name == video.get_container_format()


def test_saves_as_the_host_calls_it(video, tmp_path):
    path = str(tmp_path / "film.mp4")
    video.save_to(path, format=Types.VideoContainer("mp4"), codec=Types.VideoCodec("h264"), metadata=None)
    assert read(path)[0] == NUM_FRAMES


def test_saves_into_memory(video):
    stream = video.get_stream_source()
    assert isinstance(stream, io.BytesIO)
    assert read(stream)[:2] == (NUM_FRAMES, ["video", "audio"])


@pytest.mark.skipif(not HAS_CODEC_OPTIONS, reason="this host writes only H.264 in MP4")
@pytest.mark.parametrize(("suffix", "codec"), [("mkv", "h264"), ("webm", "av1")])
def test_other_formats_go_through_the_host(video, tmp_path, suffix, codec):
    path = str(tmp_path / f"film.{suffix}")
    video.save_to(path, format=Types.VideoContainer(suffix), codec=Types.VideoCodec(codec), crf=40.0)
    count, kinds, _, name = read(path)
    assert (count, kinds) == (NUM_FRAMES, ["video", "audio"])
    assert "matroska" in name


@pytest.mark.parametrize(
    ("start", "duration", "kept"),
    [
        (None, None, slice(0, 22)),
        (0.5, None, slice(12, 22)),
        (0.5, 0.25, slice(12, 18)),
        (0.5, 0, slice(12, 22)),
        (-0.25, None, slice(16, 22)),
        (-9.0, None, slice(0, 22)),
        (0.5, 60, slice(12, 22)),
    ],
)
def test_trimmed_part_has_its_frames_and_their_sound(video, start, duration, kept):
    part = video.as_trimmed(start, duration)
    assert torch.equal(part.frames.pixels, video.frames.pixels[kept])
    first = round(Fraction(kept.start, 24) * RATE)
    last = 29600 if kept.stop == 22 else round(Fraction(kept.stop, 24) * RATE)
    assert torch.equal(part.audio.samples, video.audio.samples[:, first:last])
    assert part.frames.pixels.data_ptr() == video.frames.pixels[kept].data_ptr()  # a view


def test_nothing_left_is_none(video):
    assert video.as_trimmed(1.0) is None
    assert video.as_trimmed(0.5, 60, strict_duration=True) is None


def test_our_own_video_comes_back_as_it_is(video):
    kept, audio = from_host(video)
    assert kept is video.frames
    assert audio is video.audio


def test_foreign_video_is_rounded_and_keeps_its_rates():
    images = torch.tensor([-0.5, 0.0, 0.4999 / 255, 0.5001 / 255, 254.6 / 255, 1.0, 7.0]).reshape(1, 1, 7, 1)
    waveform = torch.zeros(1, 2, 480)
    components = Types.VideoComponents(
        images=images.expand(20, 2, 7, 3),
        audio={"waveform": waveform, "sample_rate": 48000},
        frame_rate=Fraction(30000, 1001),
    )
    ours, audio = from_host(InputImpl.VideoFromComponents(components))
    assert ours.fps == Fraction(30000, 1001)
    assert audio.sample_rate == 48000
    assert ours.pixels[19, 1, :, 2].tolist() == [0, 0, 0, 1, 255, 255, 255]


def test_audio_goes_there_and_back_with_its_times():
    audio = sound()
    given = host_audio.H3Audio(audio)
    assert set(given) == {"waveform", "sample_rate"}
    back = host_audio.from_host(given)
    assert torch.equal(back.samples, audio.samples)
    assert back.timings is audio.timings


def test_several_clips_of_sound_are_refused():
    with pytest.raises(RequestError, match="not one clip"):
        host_audio.from_host({"waveform": torch.zeros(2, 2, 100), "sample_rate": RATE})
