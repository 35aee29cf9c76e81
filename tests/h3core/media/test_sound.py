"""Resampling against torchaudio, and what a reference waveform keeps: pitch, level, channels and length."""

import math
import resource
from fractions import Fraction

import av
import numpy as np
import pytest
import torch

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media.clips import FileClip
from comfyui_h3.h3core.media.sound import PIECE, SAMPLE_RATE, reference_waveform, sinc_resample
from comfyui_h3.h3core.types import Audio
from comfyui_h3.tests.tolerances import PARITY, relative_error

RATES = (8000, 11025, 16000, 22050, 24000, 44100, 48000, 88200, 96000)
ODD_RATES = (44056, 47952, 12345, 192000, 768000)
LEVEL_DB, PITCH_HZ = 0.1, 1.0  # what the ear and the model cannot tell


def noise(num_channels, num_samples, seed=0):
    return torch.randn(num_channels, num_samples, generator=torch.Generator().manual_seed(seed))


def sine(rate, seconds=1.0, hertz=440.0, level=0.5, num_channels=1):
    t = torch.arange(round(rate * seconds), dtype=torch.float64) / rate
    return (level * torch.sin(2 * math.pi * hertz * t)).float().expand(num_channels, -1).contiguous()


def pitch_and_level(samples, rate):
    """Hertz and amplitude of the strongest tone of (N,), the edges left out."""
    samples = samples[len(samples) // 10 : -len(samples) // 10].double()
    window = torch.hann_window(len(samples), dtype=torch.float64)
    padded = 1 << (8 * len(samples)).bit_length()
    spectrum = torch.fft.rfft(samples * window, padded).abs()
    peak = int(spectrum.argmax())
    return peak * rate / padded, float(2 * spectrum[peak] / window.sum())


def assert_same_tone(samples, rate, hertz=440.0, level=0.5):
    found_hertz, found_level = pitch_and_level(samples, rate)
    assert abs(found_hertz - hertz) < PITCH_HZ
    assert abs(20 * math.log10(found_level / level)) < LEVEL_DB


@pytest.mark.parametrize("rate", [*RATES, *ODD_RATES])
def test_resampling_is_bit_identical_to_torchaudio(rate):
    torchaudio = pytest.importorskip("torchaudio")
    theirs = torchaudio.transforms.Resample(rate, SAMPLE_RATE)
    for num_samples in (1, 2, 100, rate // 3 + 7):
        samples = noise(2, num_samples)
        assert torch.equal(sinc_resample(samples, rate, SAMPLE_RATE), theirs(samples))


@pytest.mark.parametrize("rate", [44100, 48000, 96000])
def test_resampling_away_from_32_khz_is_bit_identical_to_torchaudio(rate):
    torchaudio = pytest.importorskip("torchaudio")
    samples = noise(2, 10_007)
    ours = sinc_resample(samples, SAMPLE_RATE, rate)
    assert torch.equal(ours, torchaudio.transforms.Resample(SAMPLE_RATE, rate)(samples))


def test_one_channel_is_torchaudio_s_but_for_the_order_of_additions():
    torchaudio = pytest.importorskip("torchaudio")
    samples = noise(1, 50_000)
    theirs = torchaudio.transforms.Resample(44100, SAMPLE_RATE)(samples)
    assert relative_error(sinc_resample(samples, 44100, SAMPLE_RATE), theirs) < PARITY


def test_long_sound_is_bit_identical_to_torchaudio():
    torchaudio = pytest.importorskip("torchaudio")
    samples = noise(2, 2 * PIECE)
    theirs = torchaudio.transforms.Resample(48000, SAMPLE_RATE)(samples)
    assert torch.equal(sinc_resample(samples, 48000, SAMPLE_RATE), theirs)


@pytest.mark.oracle
@pytest.mark.parametrize(("num_channels", "rate"), [(1, 44100), (2, 48000), (2, 32000)])
def test_waveforms_are_those_of_diffusers(num_channels, rate):
    pytest.importorskip("torchaudio")
    from diffusers.modular_pipelines.minimax_h3.before_encoder import MiniMaxH3Ref2VASetupStep

    samples, seconds = noise(num_channels, 2 * rate), 39 / 24
    theirs = MiniMaxH3Ref2VASetupStep._normalize_audio_condition(samples, rate, SAMPLE_RATE, seconds)
    assert torch.equal(reference_waveform(Audio(samples=samples, sample_rate=rate), seconds), theirs)


def test_the_length_is_rounded_up():
    assert sinc_resample(noise(2, 1001), 44100, 32000).shape == (2, math.ceil(1001 * 320 / 441))


def test_equal_rates_change_nothing():
    samples = noise(2, 100)
    assert sinc_resample(samples, 32000, 32000) is samples


@pytest.mark.parametrize(("rate", "seconds"), [(44099, 15), (48000, 600)])
def test_rates_without_a_common_divisor_and_long_sound_need_little_memory(rate, seconds):
    # 15 s stereo at 44099 Hz are 5 MB; all kernels at once would be 5.6 GB. Ten minutes at 48 kHz are 230 MB in and
    # 154 MB out; the input is padded, and nothing else may be there as a whole.
    samples = torch.zeros(2, rate * seconds)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sinc_resample(samples, rate, SAMPLE_RATE).shape[1] == SAMPLE_RATE * seconds
    grown_gb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e9
    assert grown_gb < (0.1 if seconds == 15 else 1.2)


@pytest.mark.parametrize("rate", [*RATES, 32000, 44056])
def test_a_tone_keeps_its_pitch_and_level(rate):
    waveform = reference_waveform(Audio(samples=sine(rate), sample_rate=rate), 5.0)
    assert waveform.shape == (2, SAMPLE_RATE)
    assert_same_tone(waveform[0], SAMPLE_RATE)


@pytest.mark.parametrize(
    ("container", "codec", "rate", "num_channels"),
    [
        ("mp4", "aac", 44100, 2),
        ("mp4", "aac", 48000, 2),
        ("mkv", "pcm_s16le", 8000, 2),
        ("mkv", "flac", 96000, 2),
        ("mkv", "pcm_s16le", 48000, 1),
    ],
)
def test_a_tone_in_a_file_keeps_its_pitch_and_level(tmp_path, container, codec, rate, num_channels):
    path = tmp_path / f"tone.{container}"
    write_tone(path, codec, rate, num_channels)
    sound = FileClip(path).sound(5.0)
    assert (sound.sample_rate, sound.samples.shape[0]) == (44100, 2)
    waveform = reference_waveform(sound, 5.0)
    # mono: -3 dB in each channel, as FFmpeg mixes it for the serving engines
    assert_same_tone(waveform[1], SAMPLE_RATE, level=0.5 if num_channels == 2 else 0.5 / math.sqrt(2))


def write_tone(path, codec, rate, num_channels):
    """One second of the sine over a still picture."""
    layout = "mono" if num_channels == 1 else "stereo"
    with av.open(str(path), "w") as container:
        video = container.add_stream("libx264", rate=24)
        video.width, video.height, video.pix_fmt = 64, 48, "yuv420p"
        audio = container.add_stream(codec, rate=rate, layout=layout)
        if codec == "aac":
            audio.bit_rate = 192_000
        for index in range(24):
            frame = av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8))
            frame.pts, frame.time_base = index, Fraction(1, 24)
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
        resampler = av.AudioResampler(format=audio.codec_context.format, layout=layout, rate=rate)
        frame = av.AudioFrame.from_ndarray(sine(rate, num_channels=num_channels).numpy(), format="fltp", layout=layout)
        frame.sample_rate, frame.time_base, frame.pts = rate, Fraction(1, rate), 0
        fifo = av.AudioFifo()
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            piece.pts = None
            fifo.write(piece)
        size = audio.codec_context.frame_size or 1024
        written = 0
        while piece := fifo.read(size, partial=True):
            piece.pts, piece.time_base, piece.sample_rate = written, Fraction(1, rate), rate
            written += piece.samples
            container.mux(audio.encode(piece))
        container.mux(audio.encode(None))


def test_mono_equals_two_equal_channels_bit_for_bit():
    mono = noise(1, 96000)
    ours = reference_waveform(Audio(samples=mono, sample_rate=48000), 5.0)
    both = reference_waveform(Audio(samples=mono.repeat(2, 1), sample_rate=48000), 5.0)
    assert torch.equal(ours, both)
    assert torch.equal(ours[0], ours[1])


def test_mono_at_32_khz_is_duplicated_at_unity():
    mono = noise(1, 3200)
    assert torch.equal(reference_waveform(Audio(samples=mono, sample_rate=32000), 5.0), mono.repeat(2, 1))


@pytest.mark.parametrize(
    ("num_channels", "left"),
    [
        (3, [1, 0, 0]),
        (4, [1, 0, 0.5**0.5, 0.5]),
        (5, [1, 0, 0.5**0.5, 0.5**0.5, 0]),
        (6, [1, 0, 0.5**0.5, 0, 0.5**0.5, 0]),
        (7, [1, 0, 0.5**0.5, 0, 0.5, 0.5**0.5, 0]),
        (8, [1, 0, 0.5**0.5, 0, 0.5**0.5, 0, 0.5**0.5, 0]),
    ],
)
def test_more_channels_are_mixed_with_the_matrix_of_ffmpeg(num_channels, left):
    samples = 0.1 * noise(num_channels, 70_000)  # more than one piece
    waveform = reference_waveform(Audio(samples=samples, sample_rate=32000), 5.0)
    expected = torch.tensor(left, dtype=torch.float64) @ samples.double()
    assert waveform.shape == (2, 70_000)
    torch.testing.assert_close(waveform[0].double(), expected, rtol=0, atol=1e-6)


def test_sound_is_cut_to_the_output_before_it_is_resampled():
    seconds = 107 / 24
    samples = noise(2, 44100 * 20)
    waveform = reference_waveform(Audio(samples=samples, sample_rate=44100), seconds)
    assert waveform.shape[1] == math.ceil(int(seconds * 44100) * 320 / 441)
    assert round(waveform.shape[1] / 800) == round(seconds * 40)
    assert torch.equal(waveform, sinc_resample(samples[:, : int(seconds * 44100)], 44100, 32000))


def test_half_a_second_is_enough():
    assert reference_waveform(Audio(samples=noise(1, 24000), sample_rate=48000), 5.0).shape == (2, 16000)


@pytest.mark.parametrize("num_samples", [0, 1, 799])
def test_sound_shorter_than_one_latent_is_refused(num_samples):
    with pytest.raises(RequestError, match=r"too short: .*at least 0\.025 s"):
        reference_waveform(Audio(samples=torch.zeros(2, num_samples), sample_rate=32000), 5.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_samples_that_are_not_finite_are_refused_with_their_place(value):
    samples = torch.zeros(2, 32000)
    samples[1, 16000] = value
    with pytest.raises(RequestError, match=r"1 NaN or Inf values, the first at 0\.500 s"):
        reference_waveform(Audio(samples=samples), 5.0)


@pytest.mark.parametrize("rate", [0, -1, 768_001, 44100.0, True])
def test_impossible_rates_are_refused(rate):
    with pytest.raises(RequestError, match="not possible; use a whole number from 1 to 768000"):
        reference_waveform(Audio(samples=torch.zeros(2, 32000), sample_rate=rate), 5.0)


@pytest.mark.parametrize("shape", [(32000,), (1, 2, 32000), (0, 32000), (9, 32000)])
def test_impossible_shapes_are_refused(shape):
    with pytest.raises(RequestError, match=r"\(channels, samples\)|channels; 1 to 8"):
        reference_waveform(Audio(samples=torch.zeros(shape)), 5.0)


@pytest.mark.parametrize("dtype", [torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_samples_of_another_kind_are_refused_by_name(dtype):
    with pytest.raises(RequestError, match=rf"is of {dtype}; convert it to floats"):
        reference_waveform(Audio(samples=torch.zeros(2, 32000).to(dtype)), 5.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_floats_are_taken(dtype):
    samples = noise(2, 32000).to(dtype)
    assert torch.equal(reference_waveform(Audio(samples=samples), 5.0), samples.float())


@pytest.mark.parametrize(("num_channels", "value"), [(2, 3e38), (6, -3e38), (1, 1e300), (2, 1001.0)])
def test_samples_that_are_no_sound_are_refused_with_their_peak(num_channels, value):
    samples = torch.zeros(num_channels, 32000, dtype=torch.float64)
    samples[-1, 7] = value
    with pytest.raises(
        RequestError, match=rf"has a peak of {abs(value):.3g}; samples lie between -1 and 1".replace("+", r"\+")
    ):
        reference_waveform(Audio(samples=samples), 5.0)


def test_loud_sound_is_taken():
    assert reference_waveform(Audio(samples=torch.full((2, 32000), -1000.0)), 5.0).min() == -1000


@pytest.mark.parametrize("seconds", [0, -1.0, math.inf, math.nan])
def test_an_impossible_length_is_refused(seconds):
    with pytest.raises(RequestError, match="positive number of seconds"):
        reference_waveform(Audio(samples=torch.zeros(2, 32000)), seconds)
