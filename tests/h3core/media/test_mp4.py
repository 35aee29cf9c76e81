"""What is in the file is read back from the file: every claim is made of the decoded streams or of the bytes."""

import io
import math
import os
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from comfyui_h3.h3core.errors import OutputError, RequestError
from comfyui_h3.h3core.media.mp4 import write_mp4, write_mp4_stream
from comfyui_h3.h3core.timing import StageTime, Timings
from comfyui_h3.h3core.types import Audio, Frames

ROOT = Path(__file__).parents[3]
NUM_FRAMES, HEIGHT, WIDTH = 39, 96, 160
SAMPLE_RATE = 32000
NUM_SAMPLES = round(NUM_FRAMES / 24 * 40) * 800  # as H3 makes them: 40 audio latents a second, 800 samples each


def moving_frames(num_frames=NUM_FRAMES, height=HEIGHT, width=WIDTH):
    """A slow diagonal gradient with a bright square that moves 2 pixels a frame."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    frames = []
    for index in range(num_frames):
        red = 40 + 150 * x / width
        green = 60 + 120 * y / height
        blue = 100 + 60 * torch.sin((x + y) / 40 + index / 8)
        pixels = torch.stack([red, green, blue], dim=-1)
        left = 2 * index % (width - 32)
        pixels[height // 4 : height // 4 + 32, left : left + 32] = torch.tensor([220.0, 180.0, 40.0])
        frames.append(pixels.round().to(torch.uint8))
    return Frames(pixels=torch.stack(frames), timings=Timings((StageTime(name="decode_video", seconds=1.0),)))


def two_tones(num_samples=NUM_SAMPLES, sample_rate=SAMPLE_RATE):
    """A rising tone on the left, a steady one on the right."""
    t = torch.arange(num_samples) / sample_rate
    left = torch.sin(2 * math.pi * (200 + 300 * t) * t)
    right = torch.sin(2 * math.pi * 330 * t)
    return Audio(
        samples=0.5 * torch.stack([left, right]),
        sample_rate=sample_rate,
        timings=Timings((StageTime(name="decode_audio", seconds=0.5),)),
    )


def decode_video(path):
    """Every frame as RGB by the exact BT.709 limited-range formula, and its time."""
    with av.open(path) as container:
        rgb, times = [], []
        for frame in container.decode(video=0):
            planes = [plane_of(frame, index).astype(np.float64) for index in range(3)]
            luma = (planes[0] - 16) / 219
            blue, red = ((plane.repeat(2, axis=0).repeat(2, axis=1) - 128) / 224 for plane in planes[1:])
            r, b = luma + 1.5748 * red, luma + 1.8556 * blue
            g = (luma - 0.2126 * r - 0.0722 * b) / 0.7152
            rgb.append(np.clip(255 * np.stack([r, g, b], axis=-1), 0, 255))
            times.append(frame.pts * frame.time_base)
    return np.stack(rgb), times


def plane_of(frame, index):
    plane = frame.planes[index]
    return np.frombuffer(plane, np.uint8).reshape(plane.height, plane.line_size)[:, : plane.width]


def decode_audio(path):
    with av.open(path) as container:
        frames = list(container.decode(audio=0))
    return np.concatenate([frame.to_ndarray() for frame in frames], axis=1), frames[0].pts


def top_level_boxes(data):
    """Names of the outermost boxes of an MP4 file, in order."""
    names, position = [], 0
    while position < len(data):
        size, name = int.from_bytes(data[position : position + 4], "big"), data[position + 4 : position + 8]
        if size == 1:
            size = int.from_bytes(data[position + 8 : position + 16], "big")
        names.append(name.decode("latin-1"))
        position += size
    return names


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """One file with picture, sound and tags, and what went into it."""
    frames, audio = moving_frames(), two_tones()
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    calls = []
    mp4 = write_mp4(
        path,
        frames,
        audio,
        metadata={"prompt": '{"1": "雨の夜"}', "workflow": "{}"},
        on_progress=lambda *call: calls.append(call),
    )
    return frames, audio, mp4, calls


def test_holds_one_h264_and_one_aac_stream(clip):
    with av.open(clip[2].path) as container:
        assert [stream.type for stream in container.streams] == ["video", "audio"]
        video, audio = container.streams.video[0], container.streams.audio[0]
        assert (video.codec_context.name, video.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert (video.width, video.height) == (WIDTH, HEIGHT)
        assert (audio.codec_context.name, audio.rate, audio.channels) == ("aac", SAMPLE_RATE, 2)


def test_frame_rate_and_count_are_exact(clip):
    rgb, times = decode_video(clip[2].path)
    assert len(rgb) == NUM_FRAMES
    assert times == [Fraction(index, 24) for index in range(NUM_FRAMES)]
    with av.open(clip[2].path) as container:
        assert container.streams.video[0].average_rate == 24
        assert container.streams.video[0].frames == NUM_FRAMES


def test_durations_are_those_of_picture_and_sound(clip):
    mp4 = clip[2]
    assert mp4.video_duration_s == NUM_FRAMES / 24
    assert mp4.audio_duration_s == NUM_SAMPLES / SAMPLE_RATE
    with av.open(mp4.path) as container:
        video, audio = container.streams.video[0], container.streams.audio[0]
        assert float(video.duration * video.time_base) == pytest.approx(mp4.video_duration_s, abs=1e-4)
        assert float(audio.duration * audio.time_base) == pytest.approx(mp4.audio_duration_s, abs=1e-3)
        assert abs(mp4.audio_duration_s - mp4.video_duration_s) <= 1 / 24


def test_sound_starts_with_the_picture(clip):
    """The encoder's 1024 samples of priming would shift it by 32 ms."""
    decoded, first_pts = decode_audio(clip[2].path)
    source = clip[1].samples.numpy()
    assert first_pts == 0
    errors = {}
    for shift in range(-32, 33):
        window = slice(4000 + shift, 24000 + shift)
        errors[shift] = float(np.abs(decoded[0, window] - source[0, 4000:24000]).mean())
    assert min(errors, key=errors.get) == 0


def test_sound_keeps_its_two_channels(clip):
    decoded, _ = decode_audio(clip[2].path)
    source = clip[1].samples.numpy()
    assert np.isfinite(decoded).all()
    assert np.abs(decoded).max() <= 1
    for channel in range(2):
        noise = decoded[channel, :NUM_SAMPLES] - source[channel]
        ratio_db = 10 * np.log10((source[channel] ** 2).mean() / (noise**2).mean())
        assert ratio_db > 45, f"channel {channel}: {ratio_db:.1f} dB"


@pytest.mark.parametrize("kind", ["tone", "noise"])
def test_sound_does_not_start_with_a_click(tmp_path, kind):
    """The encoder spoils the first piece it is given: by 0.3 to 0.5 of full scale without a lead-in."""
    generator = torch.Generator().manual_seed(0)
    samples = two_tones().samples if kind == "tone" else 0.1 * torch.randn(2, NUM_SAMPLES, generator=generator)
    write_mp4(tmp_path / "film.mp4", moving_frames(num_frames=NUM_FRAMES), Audio(samples=samples))
    decoded, _ = decode_audio(tmp_path / "film.mp4")
    error = np.abs(decoded[:, :NUM_SAMPLES] - samples.numpy())
    assert error[:, :2048].max() < 0.1
    assert error[:, :2048].max() < 1.5 * error[:, 4096:-2048].max() + 0.02


def test_colours_are_tagged_bt709_limited(clip):
    with av.open(clip[2].path) as container:
        context = container.streams.video[0].codec_context
        tags = (context.colorspace, context.color_primaries, context.color_trc, context.color_range)
        assert tuple(int(tag) for tag in tags) == (1, 1, 1, 1)
    assert b"colrnclx" in clip[2].path.read_bytes()


def test_picture_survives(clip):
    decoded, _ = decode_video(clip[2].path)
    error = decoded - clip[0].pixels.numpy()
    assert 10 * np.log10(255**2 / (error**2).mean()) > 35
    assert np.abs(error.mean(axis=(0, 1, 2))).max() < 0.5  # no colour cast: another matrix or range gives 3 and more
    assert decoded.std(axis=(1, 2, 3)).min() > 10
    assert np.abs(np.diff(decoded, axis=0)).mean() > 0.5


@pytest.mark.parametrize(
    "colour", [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (128, 128, 128), (30, 200, 120)]
)
def test_flat_colours_come_back(tmp_path, colour):
    pixels = torch.tensor(colour, dtype=torch.uint8).expand(5, 64, 64, 3)
    write_mp4(tmp_path / "flat.mp4", Frames(pixels=pixels), None)
    decoded, _ = decode_video(tmp_path / "flat.mp4")
    assert np.abs(decoded - np.array(colour)).max() <= 3  # 8-bit limited-range YUV


def test_tags_are_readable(clip):
    with av.open(clip[2].path) as container:
        assert container.metadata["prompt"] == '{"1": "雨の夜"}'
        assert container.metadata["workflow"] == "{}"


def test_index_lies_before_the_data(clip):
    """A player can start at once, and a page finds the graph in the first 64 MiB."""
    names = top_level_boxes(clip[2].path.read_bytes())
    assert names.index("moov") < names.index("mdat")


def test_progress_counts_frames(clip):
    assert clip[3] == [(done, NUM_FRAMES) for done in range(NUM_FRAMES + 1)]


def test_timings_carry_the_stages_before(clip):
    assert [stage.name for stage in clip[2].timings.stages] == ["decode_video", "decode_audio", "save_mp4"]
    assert clip[2].timings.stages[-1].num_units == NUM_FRAMES


def test_packets_are_interleaved(clip):
    with av.open(clip[2].path) as container:
        kinds = [packet.stream.type for packet in container.demux() if packet.dts is not None]
    longest = max(len(run) for run in "".join(kind[0] for kind in kinds).split("a"))
    assert longest < 12, "many pictures in a row without sound"


def test_silent_video_has_one_stream(tmp_path):
    mp4 = write_mp4(tmp_path / "silent.mp4", moving_frames(num_frames=5), None)
    assert mp4.audio_duration_s == 0.0
    with av.open(mp4.path) as container:
        assert [stream.type for stream in container.streams] == ["video"]


def test_single_frame_is_a_video(tmp_path):
    write_mp4(tmp_path / "one.mp4", moving_frames(num_frames=1), two_tones(num_samples=800))
    assert len(decode_video(tmp_path / "one.mp4")[0]) == 1


@pytest.mark.parametrize(("fps", "written"), [(23.976, Fraction(2997, 125)), (29.97, Fraction(2997, 100)), (24.0, 24)])
def test_float_frame_rates_of_other_nodes_become_ratios_a_file_can_hold(tmp_path, fps, written):
    write_mp4(tmp_path / "rate.mp4", replace(moving_frames(num_frames=12), fps=Fraction(fps)), None)
    with av.open(str(tmp_path / "rate.mp4")) as container:
        assert container.streams.video[0].average_rate == written


@pytest.mark.parametrize("fps", [Fraction(30), Fraction(24000, 1001), Fraction(25, 2)])
def test_foreign_frame_rates_stay_exact(tmp_path, fps):
    frames = moving_frames(num_frames=12)
    write_mp4(tmp_path / "rate.mp4", Frames(pixels=frames.pixels, fps=fps), None)
    with av.open(tmp_path / "rate.mp4") as container:
        assert container.streams.video[0].average_rate == fps


@pytest.mark.parametrize("sample_rate", [44100, 48000, 16000])
def test_foreign_sample_rates_are_kept(tmp_path, sample_rate):
    audio = two_tones(num_samples=sample_rate, sample_rate=sample_rate)
    write_mp4(tmp_path / "rate.mp4", moving_frames(num_frames=24), audio)
    with av.open(tmp_path / "rate.mp4") as container:
        stream = container.streams.audio[0]
        assert stream.rate == sample_rate
        assert float(stream.duration * stream.time_base) == pytest.approx(1.0, abs=1e-3)


def test_mono_becomes_two_equal_channels(tmp_path):
    audio = Audio(samples=two_tones().samples[:1])
    write_mp4(tmp_path / "mono.mp4", moving_frames(), audio)
    decoded, _ = decode_audio(tmp_path / "mono.mp4")
    assert len(decoded) == 2
    assert np.abs(decoded[0] - decoded[1]).max() < 1e-3


def test_samples_beyond_full_scale_are_clipped(tmp_path):
    loud = Audio(samples=two_tones().samples * 6)
    clipped = Audio(samples=loud.samples.clamp(-1, 1))
    write_mp4(tmp_path / "loud.mp4", moving_frames(), loud)
    write_mp4(tmp_path / "clipped.mp4", moving_frames(), clipped)
    assert np.array_equal(decode_audio(tmp_path / "loud.mp4")[0], decode_audio(tmp_path / "clipped.mp4")[0])


def test_odd_row_length_keeps_its_stride(tmp_path):
    """1338 is no multiple of the line alignment: a wrong stride shears the picture."""
    frames = moving_frames(num_frames=3, height=64, width=1338)
    write_mp4(tmp_path / "stride.mp4", frames, None)
    error = decode_video(tmp_path / "stride.mp4")[0] - frames.pixels.numpy()
    assert 10 * np.log10(255**2 / (error**2).mean()) > 33


def test_stream_target_is_the_same_film():
    stream = io.BytesIO()
    write_mp4_stream(stream, moving_frames(), two_tones(), metadata={"prompt": "{}"})
    stream.seek(0)
    with av.open(stream) as container:
        assert container.metadata["prompt"] == "{}"
    stream.seek(0)
    assert len(decode_video(stream)[0]) == NUM_FRAMES


def test_finished_file_replaces_an_old_one(tmp_path):
    path = tmp_path / "film.mp4"
    path.write_bytes(b"old")
    write_mp4(path, moving_frames(num_frames=5), None)
    assert len(decode_video(path)[0]) == 5
    assert os.listdir(tmp_path) == ["film.mp4"]


def test_link_is_replaced_not_followed(tmp_path):
    (tmp_path / "precious").write_bytes(b"old")
    (tmp_path / "film.mp4").symlink_to(tmp_path / "precious")
    write_mp4(tmp_path / "film.mp4", moving_frames(num_frames=5), None)
    assert (tmp_path / "precious").read_bytes() == b"old"
    assert not (tmp_path / "film.mp4").is_symlink()


@pytest.mark.parametrize("stop_at", [0, 1, 20, NUM_FRAMES])
def test_cancel_leaves_the_folder_as_it_was(tmp_path, stop_at):
    class Cancelled(BaseException):
        """As the host's: not an Exception."""

    def cancel(done, total):
        if done == stop_at:
            raise Cancelled

    path = tmp_path / "film.mp4"
    path.write_bytes(b"old")
    with pytest.raises(Cancelled):
        write_mp4(path, moving_frames(), two_tones(), on_progress=cancel)
    assert os.listdir(tmp_path) == ["film.mp4"]
    assert path.read_bytes() == b"old"


def test_error_of_the_callback_is_not_taken_for_one_of_the_disk(tmp_path):
    def fail(done, total):
        raise ConnectionResetError("the page left")

    with pytest.raises(ConnectionResetError, match="the page left"):
        write_mp4(tmp_path / "film.mp4", moving_frames(), None, on_progress=fail)
    assert os.listdir(tmp_path) == []


BAD_SAMPLES = {
    "nan": (lambda s: s.index_fill(1, torch.tensor([16000]), math.nan), r"2 NaN or Inf.*0\.500 s.*decode_audio"),
    "inf": (lambda s: s.index_fill(1, torch.tensor([0]), -math.inf), r"NaN or Inf.*0\.000 s.*decode_audio"),
    "empty": (lambda s: s[:, :0], "samples must be"),
    "surround": (lambda s: s.repeat(3, 1), "6 channels.*mono or stereo"),
    "integers": (lambda s: s.to(torch.int16), "samples must be"),
    "batch": (lambda s: s[None], "samples must be"),
}


@pytest.mark.parametrize("case", BAD_SAMPLES)
def test_bad_sound_is_refused_before_a_file_exists(tmp_path, case):
    spoil, message = BAD_SAMPLES[case]
    audio = Audio(samples=spoil(two_tones().samples))
    with pytest.raises(OutputError, match=message):
        write_mp4(tmp_path / "film.mp4", moving_frames(), audio)
    assert os.listdir(tmp_path) == []


def test_sample_rate_aac_does_not_know_is_refused(tmp_path):
    with pytest.raises(OutputError, match=r"37800 Hz.*32000"):
        write_mp4(tmp_path / "film.mp4", moving_frames(), two_tones(sample_rate=37800))


BAD_FRAMES = {
    "none": (torch.zeros(0, 64, 64, 3, dtype=torch.uint8), "no frames"),
    "odd width": (torch.zeros(5, 64, 63, 3, dtype=torch.uint8), "63x64.*even"),
    "odd height": (torch.zeros(5, 33, 64, 3, dtype=torch.uint8), "64x33.*even"),
    "no height": (torch.zeros(5, 0, 64, 3, dtype=torch.uint8), "64x0.*even"),
    "floats": (torch.zeros(5, 64, 64, 3), "uint8"),
    "channels first": (torch.zeros(5, 3, 64, 64, dtype=torch.uint8), "uint8"),
    "one picture": (torch.zeros(64, 64, 3, dtype=torch.uint8), "uint8"),
}


@pytest.mark.parametrize("case", BAD_FRAMES)
def test_bad_frames_are_refused_before_a_file_exists(tmp_path, case):
    pixels, message = BAD_FRAMES[case]
    with pytest.raises(OutputError, match=message):
        write_mp4(tmp_path / "film.mp4", Frames(pixels=pixels), None)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("option", [{"crf": -1}, {"crf": 52}, {"crf": 18.5}, {"crf": True}, {"crf": "18:stats=x"}])
def test_quality_outside_its_range_is_refused(tmp_path, option):
    with pytest.raises(RequestError, match=r"0 .*51"):
        write_mp4(tmp_path / "film.mp4", moving_frames(), None, **option)


@pytest.mark.parametrize("preset", ["placebo", "", "fast:stats=/x", None])
def test_preset_outside_the_list_is_refused(tmp_path, preset):
    with pytest.raises(RequestError, match=r"ultrafast.*medium"):
        write_mp4(tmp_path / "film.mp4", moving_frames(), None, preset=preset)


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(OutputError, match=r"not_there.*No such file"):
        write_mp4(tmp_path / "not_there" / "film.mp4", moving_frames(), None)


def test_folder_that_is_a_file_is_named(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    with pytest.raises(OutputError, match=r"plain: Not a directory; choose"):
        write_mp4(tmp_path / "plain" / "film.mp4", moving_frames(), None)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs /proc, a folder in which even root cannot write")
def test_unwritable_folder_is_named():
    with pytest.raises(OutputError, match=r"cannot write film\.mp4 into /proc/self"):
        write_mp4("/proc/self/film.mp4", moving_frames(), None)


def test_name_that_is_too_long_is_refused_before_encoding(tmp_path):
    with pytest.raises(OutputError, match="File name too long"):
        write_mp4(tmp_path / ("x" * 300 + ".mp4"), moving_frames(), None, on_progress=lambda *_: pytest.fail("encoded"))
    assert os.listdir(tmp_path) == []


def test_folder_in_place_of_the_file_is_kept(tmp_path):
    (tmp_path / "film.mp4").mkdir()
    with pytest.raises(OutputError, match="is a folder"):
        write_mp4(tmp_path / "film.mp4", moving_frames(), None)
    assert os.listdir(tmp_path) == ["film.mp4"]


FULL_DISK = """
import resource, runpy, signal, sys
runpy.run_path(sys.argv[1] + "/_bootstrap.py")["register"]()
from comfyui_h3.h3core.errors import OutputError
from comfyui_h3.h3core.media.mp4 import write_mp4
from comfyui_h3.tests.h3core.media.test_mp4 import moving_frames, two_tones
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))
try:
    write_mp4(sys.argv[2] + "/film.mp4", moving_frames(num_frames=int(sys.argv[4])), two_tones())
except OutputError as error:
    sys.exit(0 if str(error).startswith("the disk is full: film.mp4") else repr(error))
sys.exit("the file was written")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_FSIZE")
@pytest.mark.parametrize(
    ("limit", "num_frames"), [(0, 5), (1000, 5), (40_000, 120)], ids=["at once", "at close", "midway"]
)
def test_full_disk_says_so_and_keeps_the_old_file(tmp_path, limit, num_frames):
    """A limit on file size stands for the disk: the same writes fail, with EFBIG in place of ENOSPC."""
    (tmp_path / "film.mp4").write_bytes(b"old")
    command = [sys.executable, "-c", FULL_DISK, str(ROOT), str(tmp_path), str(limit), str(num_frames)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert os.listdir(tmp_path) == ["film.mp4"]
    assert (tmp_path / "film.mp4").read_bytes() == b"old"
