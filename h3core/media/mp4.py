"""Writes picture and sound into one MP4: H.264 (BT.709, limited range) and AAC, the index at the start of the file.

The file appears under its name when it is complete, or not at all.
"""

from __future__ import annotations

import atexit
import errno
import functools
import os
import secrets
import stat
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO

import av
import numpy as np
import torch
from av.container import OutputContainer
from av.video.reformatter import ColorRange, Colorspace, Interpolation
from av.video.stream import VideoStream
from torch import Tensor

from comfyui_h3.h3core.errors import OutputError, RequestError
from comfyui_h3.h3core.parking import PARKING
from comfyui_h3.h3core.timing import StageTimer, Timings
from comfyui_h3.h3core.types import Audio, Frames, Mp4, Progress

PRESETS = ("ultrafast", "superfast", "veryfast", "faster", "fast", "medium")
CRF_MIN, CRF_MAX = 0, 51
DEFAULT_CRF, DEFAULT_PRESET = 18, "fast"
MAX_RATE_DENOMINATOR = 10_000  # 24000/1001 stays; a float such as 23.976 is a ratio that no container can hold
AUDIO_BIT_RATE = 192_000  # the native AAC encoder: 49.6 dB on a chirp; its default of 128k gives 27.8 dB
AUDIO_RATES = (96000, 88200, 64000, 48000, 44100, 32000, 24000, 22050, 16000, 12000, 11025, 8000, 7350)  # AAC's own
AUDIO_PIECE = 1024  # samples: one AAC frame
COLOUR_BT709, RANGE_LIMITED = 1, 1  # ITU-T H.273; matrix, primaries and transfer share the number


def write_mp4(
    path: str | os.PathLike[str],
    frames: Frames,
    audio: Audio | None,
    *,
    metadata: Mapping[str, str] | None = None,
    crf: int = DEFAULT_CRF,
    preset: str = DEFAULT_PRESET,
    on_progress: Progress | None = None,
) -> Mp4:
    """The finished file at ``path``; a file that was there is replaced at the very end.

    metadata: text tags of the container; a ComfyUI page reads its graph back from "prompt" and "workflow".
    crf: 0 (lossless) to 51 (smallest). preset: one of PRESETS, slower ones make smaller files.
    on_progress: called with (frames encoded, all frames).

    Picture and sound keep their own lengths; both start at 0. One channel becomes two equal ones; samples outside
    [-1, 1] are clipped. Raises RequestError for crf and preset, OutputError for frames or samples that cannot be
    written and for a folder or a disk that does not take them. After any error, no part of the file is left.
    """
    check_options(crf, preset)
    waveform = _check_media(frames, audio)
    frames = _with_usable_rate(frames)
    path = Path(path).absolute()
    timer = StageTimer(torch.device("cpu"))
    options = _Options(crf=crf, preset=preset, metadata=dict(metadata or {}), faststart=True)
    num_frames = len(frames.pixels)
    report = PARKING.watched(on_progress)
    with (
        PARKING.stage(),
        timer.stage("save_mp4", num_units=num_frames),
        _complete_or_absent(path) as partial,
        closing(_encode(str(partial), frames, audio, waveform, options)) as encoded,
    ):
        for done in _explained(encoded, path):
            report(done, num_frames)
    timings = frames.timings + (audio.timings if audio else Timings()) + timer.timings
    return Mp4(
        path=path,
        video_duration_s=float(len(frames.pixels) / frames.fps),
        audio_duration_s=audio.samples.shape[-1] / audio.sample_rate if audio else 0.0,
        timings=timings,
    )


def write_mp4_stream(
    stream: BinaryIO,
    frames: Frames,
    audio: Audio | None,
    *,
    metadata: Mapping[str, str] | None = None,
    crf: int = DEFAULT_CRF,
    preset: str = DEFAULT_PRESET,
) -> None:
    """As ``write_mp4``, into an open binary stream that can seek. Its index is at the end of the file."""
    check_options(crf, preset)
    waveform = _check_media(frames, audio)
    frames = _with_usable_rate(frames)
    # Moving the index to the start needs a file that FFmpeg can open again by its name.
    options = _Options(crf=crf, preset=preset, metadata=dict(metadata or {}), faststart=False)
    try:
        for _ in _encode(stream, frames, audio, waveform, options):
            pass
    except (av.FFmpegError, OSError) as error:
        raise OutputError(f"the video could not be encoded: {error}") from error


def check_options(crf: int, preset: str) -> None:
    """Raises RequestError for a quality or a preset that does not exist. No other encoder option is let through."""
    if isinstance(crf, bool) or not isinstance(crf, int) or not CRF_MIN <= crf <= CRF_MAX:
        raise RequestError(f"crf={crf!r} is not possible; use {CRF_MIN} (lossless) to {CRF_MAX} (smallest file)")
    if preset not in PRESETS:
        raise RequestError(f"preset={preset!r} does not exist; use one of {', '.join(PRESETS)}")


def _check_media(frames: Frames, audio: Audio | None) -> np.ndarray | None:
    """The samples as (2, N) float32 in [-1, 1], None without audio. Raises OutputError for what cannot be encoded."""
    pixels = frames.pixels
    if pixels.ndim != 4 or pixels.shape[-1] != 3 or pixels.dtype != torch.uint8:
        raise OutputError(f"frames must be (F, H, W, 3) uint8, got {tuple(pixels.shape)} {pixels.dtype}")
    num_frames, height, width, _ = pixels.shape
    if num_frames == 0:
        raise OutputError("there are no frames to write")
    if height < 2 or width < 2 or height % 2 or width % 2:
        raise OutputError(f"frames of {width}x{height} cannot be written as H.264 4:2:0; both sides must be even")
    if frames.fps <= 0:
        raise OutputError(f"{frames.fps} frames per second is not possible; it must be above 0")
    return None if audio is None else _check_samples(audio.samples, audio.sample_rate)


def _with_usable_rate(frames: Frames) -> Frames:
    return replace(frames, fps=Fraction(frames.fps).limit_denominator(MAX_RATE_DENOMINATOR))


def _check_samples(samples: Tensor, sample_rate: int) -> np.ndarray:
    if samples.ndim != 2 or not samples.is_floating_point() or samples.shape[1] == 0:
        raise OutputError(f"samples must be (channels, N) floats, got {tuple(samples.shape)} {samples.dtype}")
    if samples.shape[0] not in (1, 2):
        raise OutputError(f"sound with {samples.shape[0]} channels is not supported; mix it to mono or stereo first")
    if sample_rate not in AUDIO_RATES:
        raise OutputError(
            f"{sample_rate} Hz is not a rate of AAC; resample to one of {', '.join(map(str, AUDIO_RATES))}"
        )
    samples = samples.detach().to("cpu", torch.float32)
    finite = torch.isfinite(samples)
    if not finite.all():
        first = int((~finite).any(dim=0).nonzero()[0])
        raise OutputError(
            f"the waveform holds {int((~finite).sum())} NaN or Inf values, the first at {first / sample_rate:.3f} s: "
            "stage decode_audio gave no usable sound, and no file was written"
        )
    return samples.clamp(-1.0, 1.0).expand(2, -1).contiguous().numpy()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    crf: int
    preset: str
    metadata: dict[str, str]
    faststart: bool


def _encode(
    target: str | BinaryIO, frames: Frames, audio: Audio | None, waveform: np.ndarray | None, options: _Options
) -> Generator[int, None, None]:
    """Writes ``target`` and yields the number of frames encoded, from 0; closing the generator early gives up."""
    movflags = "faststart+use_metadata_tags" if options.faststart else "use_metadata_tags"
    container = av.open(target, mode="w", format="mp4", options={"movflags": movflags})
    try:
        container.metadata.update(options.metadata)  # before the streams: the header is written with the first packet
        video = _add_video(container, frames, options)
        sound = None if audio is None or waveform is None else _Sound(container, waveform, audio.sample_rate)
        yield 0
        for index, frame in enumerate(_yuv_frames(frames)):
            container.mux(video.encode(frame))
            if sound is not None:
                sound.write_until((index + 1) / frames.fps)
            yield index + 1
        container.mux(video.encode(None))
        if sound is not None:
            sound.finish()
        container.close()  # writes the index: an error here is an error of the file
    except BaseException:
        with suppress(av.FFmpegError, OSError):
            container.close()
        raise


def _add_video(container: OutputContainer, frames: Frames, options: _Options) -> VideoStream:
    _, height, width, _ = frames.pixels.shape
    stream = container.add_stream(
        "libx264", rate=frames.fps, options={"crf": str(options.crf), "preset": options.preset}
    )
    stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
    context = stream.codec_context  # tags on the frames alone do not reach the file
    context.time_base = 1 / frames.fps
    context.colorspace = context.color_primaries = context.color_trc = COLOUR_BT709
    context.color_range = RANGE_LIMITED
    return stream


def _yuv_frames(frames: Frames) -> Iterator[av.VideoFrame]:
    for index, pixels in enumerate(frames.pixels):
        frame = av.VideoFrame.from_ndarray(pixels.cpu().contiguous().numpy(), format="rgb24").reformat(
            format="yuv420p",
            dst_colorspace=Colorspace.ITU709,
            dst_color_range=ColorRange.MPEG,
            interpolation=Interpolation.AREA,  # box chroma: at most 1 step from the exact BT.709 formula
        )
        frame.pts, frame.time_base = index, 1 / frames.fps
        yield frame


class _Sound:
    """The AAC stream, written piece by piece so that its packets lie beside the pictures of the same time.

    One piece of silence goes in before time 0, where no player plays it: FFmpeg's encoder puts a click of up to half
    of full scale into the very first piece it gets (measured on tones and noise at 192 kb/s, FFmpeg 8).
    """

    def __init__(self, container: OutputContainer, waveform: np.ndarray, sample_rate: int):
        self._container, self._waveform, self._rate = container, waveform, sample_rate
        self._stream = container.add_stream("aac", rate=sample_rate, layout="stereo")
        self._stream.bit_rate = AUDIO_BIT_RATE
        self._position = 0

    def write_until(self, seconds: Fraction) -> None:
        if self._position == 0:
            self._write(np.zeros((2, AUDIO_PIECE), np.float32), -AUDIO_PIECE)
        while self._position < min(seconds * self._rate, self._waveform.shape[1]):
            piece = np.ascontiguousarray(self._waveform[:, self._position : self._position + AUDIO_PIECE])
            self._write(piece, self._position)
            self._position += piece.shape[1]

    def finish(self) -> None:
        self.write_until(Fraction(self._waveform.shape[1], self._rate))
        self._container.mux(self._stream.encode(None))

    def _write(self, piece: np.ndarray, pts: int) -> None:
        frame = av.AudioFrame.from_ndarray(piece, format="fltp", layout="stereo")
        frame.sample_rate, frame.time_base = self._rate, Fraction(1, self._rate)
        frame.pts = pts  # without it the encoder's priming becomes 32 ms of leading silence
        self._container.mux(self._stream.encode(frame))


def _explained(encoded: Iterator[int], path: Path) -> Iterator[int]:
    """The same, with errors of the encoder and the disk as OutputError. What the caller raises passes untouched."""
    try:
        yield from encoded
    except (av.FFmpegError, OSError) as error:
        raise _output_error(path, error) from error


@contextmanager
def _complete_or_absent(path: Path) -> Iterator[Path]:
    """A new file beside ``path`` to write to; it takes that name when the block ends well, else it is removed."""
    partial = path.parent / f".h3-{secrets.token_hex(8)}.mp4"
    try:
        with suppress(FileNotFoundError):
            if stat.S_ISDIR(os.lstat(path).st_mode):  # this also fails for a name that is too long
                raise OutputError(f"{path} is a folder; give the name of a file")
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except OSError as error:
        raise _output_error(path, error) from error
    remove = functools.partial(_remove, partial)
    atexit.register(remove)  # of a process that leaves in the middle, this block never ends
    try:
        yield partial
        _finish(partial, path)
    except BaseException:
        remove()
        raise
    finally:
        atexit.unregister(remove)


def _remove(partial: Path) -> None:
    with suppress(OSError):
        partial.unlink()


def _finish(partial: Path, path: Path) -> None:
    try:
        descriptor = os.open(partial, os.O_RDWR)
        try:
            os.fsync(descriptor)  # some file systems report a full disk only here
        finally:
            os.close(descriptor)
        os.replace(partial, path)
    except OSError as error:
        raise _output_error(path, error) from error


def _output_error(path: Path, error: Exception) -> OutputError:
    code = getattr(error, "errno", None)
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "free some space, or choose a folder on another disk, and queue again"
        return OutputError(f"the disk is full: {path.name} could not be written to {path.parent}; {remedy}")
    reason = os.strerror(code) if code and code > 0 else str(error)
    return OutputError(f"cannot write {path.name} into {path.parent}: {reason}; choose a folder that can be written")
