"""The soundtrack of a media file, on the clock of its pictures: stereo at 44.1 kHz, holes filled with silence."""

from __future__ import annotations

from fractions import Fraction

import av
import numpy as np
from av.audio.stream import AudioStream
from av.container import InputContainer

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media.decode import (
    REMEDY,
    SEEKABLE_SOUND,
    MediaFile,
    decoded,
    kind_of,
    origin_of,
    seek,
    time_base,
)

SOUND_RATE = 44100
GAP_S = Fraction(1, 10)  # of timestamps: less is jitter, more is a hole to be filled with silence
PREROLL_S = 1  # decoded before a cut, so that codecs with overlapping windows are settled there


def stereo_sound(
    container: InputContainer, stream: AudioStream, from_s: Fraction, num_samples: int, file: MediaFile
) -> np.ndarray:
    """(2, N) float32 at 44.1 kHz, N <= num_samples, through swresample; sample 0 is at ``from_s`` of the file's clock.

    Sound that starts later is preceded by silence, and so are holes between its packets; mono loses 3 dB per channel,
    as with ``ffmpeg -ac 2``. N is 0 when nothing sounds in the window.
    """
    if stream.codec_context is None:
        raise RequestError(f"the sound of {file.name} is coded in a way that this FFmpeg has no decoder for; {REMEDY}")
    track = _Track(num_samples)
    if from_s - PREROLL_S > origin_of(stream) and kind_of(container) in SEEKABLE_SOUND:
        seek(container, stream, from_s - PREROLL_S)
    base, expected = time_base(stream), Fraction(0)
    for frame in decoded(container, stream, av.AudioFrame, file):
        start = expected if frame.pts is None else frame.pts * base - from_s
        if start * SOUND_RATE >= num_samples:
            break
        if track.is_idle or abs(start - expected) > GAP_S or not track.fits(frame):
            track.restart(frame, round(start * SOUND_RATE))
            expected = start
        expected += Fraction(frame.samples, frame.sample_rate)
        track.add(frame)
        if track.is_full:
            break
    track.flush()
    return track.samples[:, : track.end]


class _Track:
    """Resampled pieces, put where they belong."""

    def __init__(self, num_samples: int):
        self.samples = np.zeros((2, num_samples), np.float32)
        self.end = 0  # of what has been written
        self._position = 0
        self._resampler: av.AudioResampler | None = None
        self._format: tuple[str, str, int] | None = None

    @property
    def is_idle(self) -> bool:
        return self._resampler is None

    @property
    def is_full(self) -> bool:
        return self.end >= self.samples.shape[1]

    def fits(self, frame: av.AudioFrame) -> bool:
        return self._format == (frame.format.name, frame.layout.name, frame.sample_rate)

    def restart(self, frame: av.AudioFrame, position: int) -> None:
        self.flush()
        self._resampler = av.AudioResampler(format="fltp", layout="stereo", rate=SOUND_RATE)
        self._format = (frame.format.name, frame.layout.name, frame.sample_rate)
        self._position = position

    def add(self, frame: av.AudioFrame | None) -> None:
        assert self._resampler is not None
        for piece in self._resampler.resample(frame):
            self._place(piece.to_ndarray())

    def flush(self) -> None:
        if self._resampler is not None and not self.is_full:
            self.add(None)
        self._resampler = None

    def _place(self, piece: np.ndarray) -> None:
        start, end = self._position, self._position + piece.shape[1]
        self._position = end
        first, last = max(start, 0), min(end, self.samples.shape[1])
        if last > first:
            self.samples[:, first:last] = piece[:, first - start : last - start]
            self.end = max(self.end, last)
