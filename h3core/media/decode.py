"""Decodes pictures and sound of a media file with FFmpeg: in a stream, upright, in true colours, on one clock.

Times are exact fractions of seconds on the clock of the file. A packet that is damaged is skipped and a file that ends
early gives what it has, with a warning in the log; a file of which nothing decodes is a RequestError.
"""

from __future__ import annotations

import errno
import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import av
import numpy as np
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.stream import Disposition, Stream
from av.video.stream import VideoStream

from comfyui_h3.h3core.errors import RequestError

log = logging.getLogger(__name__)

# Containers of video. FFmpeg knows others that are scripts: playlists that open further files or addresses, and a
# terminal that draws any text file as a video.
CONTAINERS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,m4v,h264,hevc,av1,obu,ivf,flv,asf,ogg,gif,apng,"
    "mxf,nut,dv,rm,wtv,yuv4mpegpipe"
)
REMEDY = "open it in a player, or convert it to MP4 (H.264 and AAC)"
SOUND_RATE = 44100
SOUND_GAP_S = Fraction(1, 10)  # of timestamps: less is jitter, more is a hole to be filled with silence
SOUND_PREROLL_S = 1  # decoded before a cut, so that codecs with overlapping windows are settled there

# Exactly the formula of the colour matrix, rounded; the default is up to 3 steps off and does not interpolate chroma.
# The numbers are swscale's, which older PyAV has no names for: bicubic, full chroma, accurate rounding.
SCALER = 0x4 | 0x2000 | 0x40000
# ITU-T H.273 number of a colour matrix -> swscale's. Older PyAV does not follow the tag by itself.
ITU601, FULL_RANGE = 5, 2
MATRICES = {1: 1, 4: 4, 5: ITU601, 6: ITU601, 7: 7}
UNTAGGED, RESERVED = 2, 3
BY_TAG_OR_DEFAULT = (0, UNTAGGED, RESERVED, 9)  # RGB; BT.601, as FFmpeg reads what has no tag; BT.2020
HDR_TRANSFERS = {16: "PQ", 18: "HLG"}

_Timed = tuple[Fraction, Fraction | None, av.VideoFrame]
FrameT = TypeVar("FrameT", av.VideoFrame, av.AudioFrame)


@contextmanager
def opened(source: Path | bytes, name: str) -> Iterator[InputContainer]:
    """The open container; closed at the end of the block, where FFmpeg's errors become RequestErrors that name it."""
    if isinstance(source, Path) and not source.is_file():
        state = "is a folder" if source.is_dir() else "does not exist or is not a file"
        raise RequestError(f"{name} {state}; give the path of a video file")
    options = {"format_whitelist": CONTAINERS, "protocol_whitelist": "file"}
    try:
        target = f"file:{source.absolute()}" if isinstance(source, Path) else io.BytesIO(source)
        with av.open(target, mode="r", options=options) as container:
            yield container
    except (av.FFmpegError, OSError) as error:
        unknown = getattr(error, "errno", None) == errno.EINVAL  # of a container that is not in CONTAINERS
        reason = "not a video container" if unknown else getattr(error, "strerror", None) or str(error)
        raise RequestError(f"{name} cannot be read as a video ({reason}); {REMEDY}") from error


def video_stream(container: InputContainer, name: str) -> VideoStream:
    """The main video stream, decoding on several threads. Raises RequestError when there is none to decode."""
    streams = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
    if not streams:
        raise RequestError(f"{name} has no video stream; give a video file")
    best = container.streams.best("video")
    stream = best if isinstance(best, VideoStream) and best in streams else streams[0]
    if stream.codec_context is None:
        raise RequestError(f"{name} is coded in a way that this FFmpeg has no decoder for; {REMEDY}")
    stream.thread_type = "AUTO"  # type: ignore[assignment]  # PyAV takes the name, too
    return stream


def sound_stream(container: InputContainer) -> AudioStream | None:
    """The main audio stream, None without one."""
    best = container.streams.best("audio")
    return best if isinstance(best, AudioStream) else None


def origin_of(stream: Stream) -> Fraction:
    """Time of a stream's first frame, as the file states it."""
    return Fraction(0) if stream.start_time is None else stream.start_time * _time_base(stream)


def rates_of(stream: VideoStream) -> tuple[Fraction, ...]:
    """Frame rates that the file or FFmpeg's guess gives for a stream, the average first; 24 where both are silent."""
    return tuple(Fraction(rate) for rate in (stream.average_rate, stream.base_rate) if rate) or (Fraction(24),)


def duration_of(container: InputContainer, stream: VideoStream) -> float:
    """Length of the video in seconds, as the file states it; of a file that does not, as its packets add up to.

    The container is read to its end in the second case.
    """
    if stream.duration:
        return float(stream.duration * _time_base(stream))
    tag = stream.metadata.get("DURATION", "").split(":")  # Matroska's "00:00:02.000000000"
    if len(tag) == 3:
        with suppress(ValueError):
            return int(tag[0]) * 3600 + int(tag[1]) * 60 + float(tag[2])
    if container.duration:
        return container.duration / av.time_base
    num_packets, end = 0, Fraction(0)
    with suppress(av.FFmpegError, OSError):  # a damaged tail
        for packet in container.demux(stream):
            num_packets += packet.size > 0
            if packet.pts is not None:
                end = max(end, (packet.pts + (packet.duration or 0)) * _time_base(stream) - origin_of(stream))
    return float(end or num_packets / rates_of(stream)[0])


def display_size(stream: VideoStream, frame: av.VideoFrame, turn: Turn) -> tuple[int, int]:
    """(width, height) of a frame as a player shows it: square pixels, upright."""
    width, height = frame.width, frame.height
    aspect = stream.sample_aspect_ratio
    if aspect:  # None or 0: unknown
        width = max(1, round(width * Fraction(aspect)))
    return (height, width) if turn.transposed else (width, height)


def codec_name(stream: VideoStream | AudioStream) -> str | None:
    """Of the format, as h264 or aac; decoders may have names of their own."""
    context = stream.codec_context
    return None if context is None else context.codec.canonical_name


def timed_video(container: InputContainer, stream: VideoStream, from_s: Fraction, name: str) -> Iterator[_Timed]:
    """(time, duration or None, frame) from the first frame at or after ``from_s``, times never falling.

    Seeks where the container can; where the first frame found is too late, reads from the start.
    """
    counts_frames = container.format.name == "avi"  # no timestamps, only an order
    if from_s > origin_of(stream) and not counts_frames and _seek(container, stream, from_s):
        first = next(_timed(container, stream, counts_frames, name), None)
        late = first is None or first[0] > from_s
        _seek(container, stream, origin_of(stream) if late else from_s)
    for timed in _timed(container, stream, counts_frames, name):
        if timed[0] >= from_s:
            yield timed


def _timed(container: InputContainer, stream: VideoStream, counts_frames: bool, name: str) -> Iterator[_Timed]:
    base = _time_base(stream)
    step = 1 / rates_of(stream)[0]
    time: Fraction | None = None
    first_dts: int | None = None
    for frame in decoded(container, stream, av.VideoFrame, name):
        if counts_frames:
            first_dts = frame.dts if first_dts is None else first_dts
            ticks = None if frame.dts is None or first_dts is None else frame.dts - first_dts + (stream.start_time or 0)
        else:
            ticks = frame.pts
        if ticks is not None:
            time = ticks * base if time is None else max(time, ticks * base)
        else:
            time = origin_of(stream) if time is None else time + step
        duration = getattr(frame, "duration", None)
        yield time, duration * base if duration else None, frame


def decoded(
    container: InputContainer, stream: VideoStream | AudioStream, kind: type[FrameT], name: str
) -> Iterator[FrameT]:
    """Frames of ``stream`` from where the container is. Damaged packets are skipped, with one warning."""
    num_frames = 0
    damage: Exception | None = None
    packets = container.demux(stream)
    ended = False
    while not ended:
        try:
            packet = next(packets, None)
        except (av.FFmpegError, OSError) as error:
            damage, packet = error, None
        ended = packet is None
        try:
            # None asks the decoder for what it still holds: demux gives such a packet only at a regular end.
            frames = stream.codec_context.decode(packet) if damage or packet else []
        except av.EOFError:
            frames = []
        except av.FFmpegError as error:
            damage, frames = error, []
        for frame in frames:
            if isinstance(frame, kind):
                num_frames += 1
                yield frame
    if damage is not None and num_frames:
        log.warning("%s is damaged (%s): its %s keeps the %d frames that decode", name, damage, stream.type, num_frames)
    elif damage is not None:
        raise RequestError(f"no {stream.type} of {name} can be decoded ({damage}): damaged or encrypted; {REMEDY}")


def _seek(container: InputContainer, stream: Stream, seconds: Fraction) -> bool:
    """Whether the container went to the last key frame before ``seconds``; else it stays where it is."""
    try:
        container.seek(int(seconds // _time_base(stream)), stream=stream)
    except (av.FFmpegError, OSError):
        return False
    return True


def _time_base(stream: Stream) -> Fraction:
    return Fraction(stream.time_base) if stream.time_base else Fraction(1, av.time_base)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """How a file is to be shown: first rows and columns change places, then each may run backwards."""

    transposed: bool = False
    flips_rows: bool = False
    flips_columns: bool = False


def turn_of(frame: av.VideoFrame) -> Turn:
    """The quarter turn and mirroring of a frame's display matrix, which is that of its file.

    To be asked of one frame only: PyAV ties a frame that was asked to itself, and its pixels stay until Python looks
    for such circles (0.5 GB in a clip of 15 s).
    """
    data: Any = frame.side_data.get("DISPLAYMATRIX")
    if data is None:
        return Turn()
    # Pixel (x, y) is shown at (a x + c y, b x + d y), up to a shift.
    a, b, _, c, d = np.frombuffer(data, np.int32)[:5].tolist()
    if abs(b) > abs(a):
        return Turn(transposed=True, flips_rows=b < 0, flips_columns=c < 0)
    return Turn(flips_rows=d < 0, flips_columns=a < 0)


def upright(frame: av.VideoFrame, turn: Turn, name: str) -> np.ndarray:
    """(h, w, 3) uint8 RGB, turned and mirrored for display; pixels may not be square.

    Follows the tags for colour matrix and range; untagged is BT.601 limited. Transparent parts are put on white. HDR is
    not tone-mapped. Raises RequestError for a colour matrix that FFmpeg's scaler does not know.
    """
    if frame.colorspace not in MATRICES and frame.colorspace not in BY_TAG_OR_DEFAULT:
        raise RequestError(f"{name} has the colour matrix {frame.colorspace} (ITU-T H.273), not supported; {REMEDY}")
    if not has_alpha(frame):
        pixels = _converted(frame, "rgb24")
    else:
        rgba = _converted(frame, "rgba")
        alpha = rgba[..., 3:].astype(np.float32) / 255
        pixels = np.rint(rgba[..., :3] * alpha + 255 * (1 - alpha)).astype(np.uint8)
    if turn.transposed:
        pixels = pixels.swapaxes(0, 1)
    pixels = pixels[:: -1 if turn.flips_rows else 1, :: -1 if turn.flips_columns else 1]
    return np.ascontiguousarray(pixels, dtype=np.uint8)


def _converted(frame: av.VideoFrame, pix_fmt: str) -> np.ndarray:
    if frame.colorspace == RESERVED:
        frame.colorspace = UNTAGGED
    matrix = MATRICES.get(frame.colorspace)
    if matrix is None:
        return frame.to_ndarray(format=pix_fmt, interpolation=SCALER)
    return frame.to_ndarray(
        format=pix_fmt,
        interpolation=SCALER,
        src_colorspace=matrix,
        dst_colorspace=ITU601,  # without meaning for RGB, but older PyAV looks at the source's only where they differ
        src_color_range=frame.color_range or None,
        dst_color_range=FULL_RANGE,
    )


def has_alpha(frame: av.VideoFrame) -> bool:
    """Whether a frame may be transparent; palettes have an alpha of their own."""
    return frame.format.has_palette or any(component.is_alpha for component in frame.format.components)


def stereo_sound(
    container: InputContainer, stream: AudioStream, from_s: Fraction, num_samples: int, name: str
) -> np.ndarray:
    """(2, N) float32 at 44.1 kHz, N <= num_samples, through swresample; sample 0 is at ``from_s`` of the file's clock.

    Sound that starts later is preceded by silence, and so are holes between its packets; mono loses 3 dB per channel,
    as with ``ffmpeg -ac 2``. N is 0 when nothing sounds in the window.
    """
    if stream.codec_context is None:
        raise RequestError(f"the sound of {name} is coded in a way that this FFmpeg has no decoder for; {REMEDY}")
    track = _Track(num_samples)
    if from_s - SOUND_PREROLL_S > origin_of(stream):
        _seek(container, stream, from_s - SOUND_PREROLL_S)
    base, expected = _time_base(stream), Fraction(0)
    for frame in decoded(container, stream, av.AudioFrame, name):
        start = expected if frame.pts is None else frame.pts * base - from_s
        if start * SOUND_RATE >= num_samples:
            break
        if track.is_idle or abs(start - expected) > SOUND_GAP_S or not track.fits(frame):
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
