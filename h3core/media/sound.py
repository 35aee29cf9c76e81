"""Sound as H3 reads it: a stereo waveform at 32 kHz, cut to the length of the target before anything else.

The resampler is the windowed sinc of torchaudio (``Resample`` with its defaults), which the release uses and hosts
need not have: the same float32 values, bit for bit for stereo (for a single channel PyTorch adds in another order).
"""

from __future__ import annotations

import math
from fractions import Fraction

import av
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.types import Audio

SAMPLE_RATE = 32000
SAMPLES_PER_LATENT = 800
MAX_RATE = 768_000
MAX_CHANNELS = 8
MAX_SAMPLE = 1000.0  # 60 dB above full scale: no sound, and past what the encoder can tell from damaged weights
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LAYOUTS = {3: "2.1", 4: "4.0", 5: "5.0", 6: "5.1", 7: "6.1", 8: "7.1"}  # what FFmpeg assumes for a count of channels
ROLLOFF, ZERO_CROSSINGS = 0.99, 6  # torchaudio's defaults
PHASES = 64  # output phases per convolution: enough to be fast, and few taps that are zero
PIECE = 1 << 20  # output samples per convolution, whose own layout takes 8 times their memory
MIX_PIECE = 1 << 16  # samples handed to FFmpeg's mixer at a time


def reference_waveform(audio: Audio, max_duration_s: float, *, what: str = "the reference sound") -> Tensor:
    """The sound a reference is encoded from: (2, L) float32 at 32 kHz, at most ``max_duration_s`` seconds.

    Cut first, to int(max_duration_s * rate) samples. One channel becomes two equal ones at unity; three to eight are
    mixed down as ``ffmpeg -ac 2`` does it for floats (no normalisation, so loud surround may pass 1). Nothing is made
    louder or clipped.

    Raises RequestError as ``check_audio`` does. what: how messages call the sound.
    """
    check_audio(audio, max_duration_s, what=what)
    rate = audio.sample_rate
    samples = _used(audio, max_duration_s).to("cpu", torch.float32)
    if len(samples) > 2:
        samples = _mix_to_stereo(samples, rate)
    return sinc_resample(samples.expand(2, -1), rate, SAMPLE_RATE).contiguous()


def check_audio(audio: Audio, max_duration_s: float, *, what: str = "the reference sound") -> None:
    """Raises RequestError for sound that cannot be a reference.

    Samples that are not (channels, N) floats, that are not finite or beyond 1000, more than 8 channels, an impossible
    rate, and less than one audio latent (25 ms). Only the first ``max_duration_s`` seconds are looked at. what: as
    messages call it.
    """
    samples, rate = audio.samples, audio.sample_rate
    if samples.dtype not in FLOATS:
        raise RequestError(f"{what} is of {samples.dtype}; convert it to floats (float32) in -1..1")
    if samples.ndim != 2:
        raise RequestError(
            f"{what} has the shape {tuple(samples.shape)}; it must be (channels, samples): of a batch, give one item"
        )
    if isinstance(rate, bool) or not isinstance(rate, int) or not 0 < rate <= MAX_RATE:
        raise RequestError(
            f"the sample rate of {what}, {rate!r} Hz, is not possible; use a whole number from 1 to {MAX_RATE}"
        )
    if not 1 <= len(samples) <= MAX_CHANNELS:
        raise RequestError(
            f"{what} has {len(samples)} channels; 1 to {MAX_CHANNELS} are possible, mix it to stereo first"
        )
    if not (max_duration_s > 0 and math.isfinite(max_duration_s)):
        raise RequestError(f"{what} of {max_duration_s} s at most is not possible; use a positive number of seconds")
    samples = _used(audio, max_duration_s)
    num_samples = samples.shape[1]
    if is_too_short(num_samples, rate):
        raise RequestError(
            f"{what} is too short: {num_samples} samples at {rate} Hz are {num_samples / rate:.4g} s; "
            "give at least 0.025 s, and 2 s or more for a useful reference, or disconnect it"
        )
    finite = torch.isfinite(samples)
    if not finite.all():
        first = int((~finite).any(dim=0).nonzero()[0])
        raise RequestError(
            f"{what} holds {int((~finite).sum())} NaN or Inf values, the first at {first / rate:.3f} s; "
            "look at the node that made it, and queue again"
        )
    peak = float(samples.abs().max())
    if peak > MAX_SAMPLE:
        raise RequestError(
            f"{what} has a peak of {peak:.3g}; samples lie between -1 and 1: make it quieter, or look at the node that "
            "made it, and queue again"
        )


def is_too_short(num_samples: int, sample_rate: int) -> bool:
    """Whether a sound fills no latent of the audio VAE, of 25 ms."""
    return num_samples < 2 or num_samples * SAMPLE_RATE <= (SAMPLES_PER_LATENT - 1) * sample_rate


def _used(audio: Audio, max_duration_s: float) -> Tensor:
    return audio.samples[:, : int(max_duration_s * audio.sample_rate)].detach()


def _mix_to_stereo(samples: Tensor, rate: int) -> Tensor:
    """(C, N) -> (2, N) by FFmpeg's matrix for the layout that it assumes for C channels."""
    mixer = av.AudioResampler(format="fltp", layout="stereo", rate=rate)
    interleaved = samples.T.contiguous().numpy()  # (N, C): PyAV cannot hand over 8 planes
    mixed = []
    for start in range(0, len(interleaved), MIX_PIECE):
        piece = interleaved[start : start + MIX_PIECE].reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(piece, format="flt", layout=LAYOUTS[len(samples)])
        frame.sample_rate, frame.time_base, frame.pts = rate, Fraction(1, rate), start
        mixed += mixer.resample(frame)
    mixed += mixer.resample(None)
    return torch.from_numpy(np.concatenate([frame.to_ndarray() for frame in mixed], axis=1))


def sinc_resample(samples: Tensor, from_rate: int, to_rate: int) -> Tensor:
    """(C, N) float32 at ``from_rate`` -> (C, ceil(to_rate * N / from_rate)); the same tensor for equal rates.

    With o / n the reduced ratio of the rates, output sample k n + p is a window of the input around k o + p o / n: one
    convolution with stride o for each phase p. Phases are taken PHASES at a time, each group with only the taps that
    its windows reach. All others of a bank of n phases and o taps (5.6 GB for 44099 Hz) are zero, and leaving them out
    changes no bit of a sum. Where blocks are longer than the windows, those are gathered first: a convolution would
    copy all of the sound for each group. The slowest pair of rates (767999 Hz, 500 groups) takes 2 s for 15 s of sound.
    """
    if from_rate == to_rate:
        return samples
    divisor = math.gcd(from_rate, to_rate)
    o, n = from_rate // divisor, to_rate // divisor
    cutoff = min(o, n) * ROLLOFF  # half periods in a block of o input samples
    reach = math.ceil(ZERO_CROSSINGS * o / cutoff)  # input samples to either side of an output sample
    num_channels, num_samples = samples.shape
    num_blocks = num_samples // o + 1  # of n output samples each
    padded = F.pad(samples, (reach, reach + o))[:, None]  # (C, 1, N + 2 reach + o)
    resampled = samples.new_empty(num_channels, num_blocks, n)
    at_once = max(1, PIECE // n)
    for phase in range(0, n, PHASES):
        phases = range(phase, min(n, phase + PHASES))
        first = phases[0] * o // n  # tap 0 is the input sample ``reach`` before the block
        end = min(2 * reach + o, phases[-1] * o // n + 2 * reach + 2)
        filters = _filters(phases, range(first - reach, end - reach), o, n, cutoff)[:, None]
        for block in range(0, num_blocks, at_once):
            last = min(num_blocks, block + at_once) - 1
            read, stride = padded[..., block * o + first : last * o + end], o
            if end - first < o:
                read, stride = read.unfold(-1, end - first, o).flatten(-2), end - first
            piece = F.conv1d(read, filters, stride=stride)  # (C, phases, blocks)
            resampled[:, block : last + 1, phases.start : phases.stop] = piece.transpose(1, 2)
    return resampled.flatten(1)[:, : math.ceil(n * num_samples / o)]


def _filters(phases: range, taps: range, o: int, n: int, cutoff: float) -> Tensor:
    """(phases, taps) float32: the low pass around each phase, at the input samples ``taps`` of a block."""
    instants = torch.arange(phases.start, phases.stop).float() / n  # in blocks; float32, as torchaudio rounds them
    inputs = torch.arange(taps.start, taps.stop).double() / o
    x = ((inputs - instants[:, None]) * cutoff).clamp_(-ZERO_CROSSINGS, ZERO_CROSSINGS)
    gain = cutoff / o
    return (_sinc(x) * (_hann(x) * gain)).float()


def _sinc(x: Tensor) -> Tensor:
    """sin(pi x) / (pi x). torch.sinc has another sine, which may differ in the last bit."""
    angle = math.pi * x
    return torch.where(angle == 0, 1.0, angle.sin() / angle)


def _hann(x: Tensor) -> Tensor:
    """1 in the middle, 0 at ZERO_CROSSINGS to either side."""
    return torch.cos(math.pi * x / (2 * ZERO_CROSSINGS)).square()
