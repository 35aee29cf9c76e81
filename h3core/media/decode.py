"""Opens media files with FFmpeg and decodes their streams, frame by frame, on one clock.

Times are exact fractions of seconds on the clock of the file. A packet that is damaged is skipped and a file that ends
early gives what it has, with a notice; a file of which nothing decodes is a RequestError.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TypeVar

import av
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.stream import Disposition, Stream
from av.video.stream import VideoStream

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media.notices import Notices

# Containers of video. FFmpeg knows others that are scripts: playlists that open further files or addresses, and a
# terminal that draws any text file as a video.
CONTAINERS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,m4v,h264,hevc,av1,obu,ivf,flv,asf,ogg,gif,apng,"
    "mxf,nut,dv,rm,wtv,yuv4mpegpipe"
)
REMEDY = "open it in a player, or convert it to MP4 (H.264 and AAC)"
FINE_TICK = Fraction(1, 4)  # of a frame: a coarser clock says nothing about a rate

_Timed = tuple[Fraction, Fraction, av.VideoFrame]
FrameT = TypeVar("FrameT", av.VideoFrame, av.AudioFrame)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaFile:
    """A file, or its bytes; what messages call it; and what was noticed about it."""

    source: Path | bytes
    name: str
    notices: Notices

    @property
    def num_bytes(self) -> int:
        return len(self.source) if isinstance(self.source, bytes) else self.source.stat().st_size


@contextmanager
def opened(file: MediaFile) -> Iterator[InputContainer]:
    """The open container; closed at the end of the block, where FFmpeg's errors become RequestErrors that name it."""
    source, name = file.source, file.name
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


def video_stream(container: InputContainer, file: MediaFile) -> VideoStream:
    """The main video stream, decoding on several threads. Raises RequestError when there is none to decode."""
    streams = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
    if not streams:
        raise RequestError(f"{file.name} has no video stream; give a video file")
    best = container.streams.best("video")
    stream = best if isinstance(best, VideoStream) and best in streams else streams[0]
    if stream.codec_context is None:
        raise RequestError(f"{file.name} is coded in a way that this FFmpeg has no decoder for; {REMEDY}")
    stream.thread_type = "AUTO"  # type: ignore[assignment]  # PyAV takes the name, too
    return stream


def sound_stream(container: InputContainer) -> AudioStream | None:
    """The main audio stream, None without one."""
    best = container.streams.best("audio")
    return best if isinstance(best, AudioStream) else None


def origin_of(stream: Stream) -> Fraction:
    """Time of a stream's first frame, as the file states it."""
    return Fraction(0) if stream.start_time is None else stream.start_time * time_base(stream)


def rates_of(stream: VideoStream) -> tuple[Fraction, ...]:
    """Frame rates that the file or FFmpeg's guess gives for a stream, the average first; 24 where both are silent."""
    return tuple(Fraction(rate) for rate in (stream.average_rate, stream.base_rate) if rate) or (Fraction(24),)


def duration_of(container: InputContainer, stream: VideoStream) -> float:
    """Length of the video in seconds, as the file states it; of a file that does not, as its packets add up to.

    The container is read to its end in the second case.
    """
    if stream.duration:
        return float(stream.duration * time_base(stream))
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
                end = max(end, (packet.pts + (packet.duration or 0)) * time_base(stream) - origin_of(stream))
    return float(end or num_packets / rates_of(stream)[0])


def codec_name(stream: VideoStream | AudioStream) -> str | None:
    """Of the format, as h264 or aac; decoders may have names of their own."""
    context = stream.codec_context
    return None if context is None else context.codec.canonical_name


def timed_video(container: InputContainer, stream: VideoStream, from_s: Fraction, file: MediaFile) -> Iterator[_Timed]:
    """(start, end, frame) from the first frame at or after ``from_s``, starts never falling; ends as the file has them.

    Seeks where the container can; where the first frame found is too late, reads from the start.
    """
    counts_frames = container.format.name == "avi"  # no timestamps, only an order
    if from_s > origin_of(stream) and not counts_frames and seek(container, stream, from_s):
        first = next(_timed(container, stream, counts_frames, file), None)
        late = first is None or first[0] > from_s
        seek(container, stream, origin_of(stream) if late else from_s)
    for timed in _timed(container, stream, counts_frames, file):
        if timed[0] >= from_s:
            yield timed


def _timed(container: InputContainer, stream: VideoStream, counts_frames: bool, file: MediaFile) -> Iterator[_Timed]:
    base, origin, rates = time_base(stream), origin_of(stream), rates_of(stream)
    start: Fraction | None = None
    first_dts: int | None = None
    for frame in decoded(container, stream, av.VideoFrame, file):
        if counts_frames:
            first_dts = frame.dts if first_dts is None else first_dts
            ticks = None if frame.dts is None or first_dts is None else frame.dts - first_dts + (stream.start_time or 0)
        else:
            ticks = frame.pts
        if ticks is not None:
            stated = origin + _snapped(ticks * base - origin, base, rates)
            start = stated if start is None else max(start, stated)
        else:
            start = origin if start is None else start + 1 / rates[0]
        duration = getattr(frame, "duration", None)
        length = duration * base if duration else 1 / rates[0]
        yield start, origin + _snapped(start + length - origin, base, rates), frame


def _snapped(time: Fraction, tick: Fraction, rates: tuple[Fraction, ...]) -> Fraction:
    """``time`` as a whole number of frames, where a clock that counts in ``tick`` seconds cannot tell them apart.

    Matroska rounds to milliseconds, and a frame on the edge of two slots would fall into the wrong one.
    """
    for rate in rates:
        exact = round(time * rate) / rate
        if tick * rate <= FINE_TICK and abs(exact - time) <= tick:
            return exact
    return time


def decoded(
    container: InputContainer, stream: VideoStream | AudioStream, kind: type[FrameT], file: MediaFile
) -> Iterator[FrameT]:
    """Frames of ``stream`` from where the container is. Damaged packets are skipped, with one notice."""
    num_frames = 0
    damage: Exception | None = None
    packets = container.demux(stream)
    ended = False
    try:
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
    finally:  # also of who has read enough
        if damage is not None and num_frames:
            what = "sound" if stream.type == "audio" else "pictures"
            file.notices.add(stream.type, f"{file.name} is damaged ({damage}): its {what} are those that decode")
    if damage is not None and not num_frames:
        raise RequestError(f"no {stream.type} of {file.name} can be decoded ({damage}): damaged or encrypted; {REMEDY}")


def seek(container: InputContainer, stream: Stream, seconds: Fraction) -> bool:
    """Whether the container went to the last key frame before ``seconds``; else it stays where it is."""
    try:
        container.seek(int(seconds // time_base(stream)), stream=stream)
    except (av.FFmpegError, OSError):
        return False
    return True


def time_base(stream: Stream) -> Fraction:
    """Seconds of one tick of a stream's clock."""
    return Fraction(stream.time_base) if stream.time_base else Fraction(1, av.time_base)
