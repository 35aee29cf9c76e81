"""Opens media files with FFmpeg and decodes their streams, frame by frame, on one clock.

Times are exact fractions of seconds on the clock of the file. A packet that is damaged is skipped and a file that ends
early gives what it has, with a notice; a file of which nothing decodes is a RequestError.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Callable, Generator, Iterator
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
# Containers that tell the time of a frame wherever one begins to read. The others are read from the start: they count
# from their first frame (AVI, bare H.264), or leave times to be guessed between others (MPEG program streams, ASF).
SEEKABLE = frozenset({"mov", "matroska", "mpegts", "flv", "mxf", "nut"})
SEEKABLE_SOUND = SEEKABLE | {"avi"}
SEEK_BACK_S = (0, 4, 16)  # MPEG-TS goes to any packet before a time, and the first key frame may come after it
FINE_TICK = Fraction(1, 4)  # of a frame: a coarser clock says nothing about a rate
LATE_START_S = Fraction(1, 2)

_Timed = tuple[Fraction, Fraction, av.VideoFrame]
FrameT = TypeVar("FrameT", av.VideoFrame, av.AudioFrame)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaFile:
    """A file, or its bytes; what messages call it; and what was noticed about it."""

    source: Path | bytes
    name: str
    notices: Notices

    def stamp(self) -> tuple[int, int, int]:
        """Size in bytes, time of the last change and inode: it differs when the file is another one.

        Raises RequestError when there is no file.
        """
        if isinstance(self.source, bytes):
            return len(self.source), 0, 0
        if not self.source.is_file():
            state = "is a folder" if self.source.is_dir() else "does not exist or is not a file"
            raise RequestError(f"{self.name} {state}; give the path of a video file")
        try:
            stat = self.source.stat()
        except OSError as error:
            raise RequestError(f"{self.name} cannot be read as a video ({error.strerror}); {REMEDY}") from error
        return stat.st_size, stat.st_mtime_ns, stat.st_ino


@contextmanager
def opened(file: MediaFile) -> Iterator[InputContainer]:
    """The open container; closed at the end of the block, where FFmpeg's errors become RequestErrors that name it."""
    source, name = file.source, file.name
    file.stamp()
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
    # Matroska states when it ends, or how long it is: that depends on who wrote it. FFmpeg's tag is an end.
    late_s = origin_of(stream) if kind_of(container) == "matroska" else Fraction(0)
    tag = stream.metadata.get("DURATION", "").split(":")  # "00:00:02.000000000"
    if len(tag) == 3:
        with suppress(ValueError):
            length_s = int(tag[0]) * 3600 + int(tag[1]) * 60 + float(tag[2]) - float(late_s)
            if length_s > 0:
                return length_s
    if container.duration and late_s <= LATE_START_S:
        return container.duration / av.time_base
    return measured_duration(container, stream)


def measured_duration(container: InputContainer, stream: VideoStream) -> float:
    """Length of the video in seconds as its packets add up to. Reads the container to its end."""
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


def timed_video(
    file: MediaFile, from_s: Fraction, on_skip: Callable[[], None] | None = None
) -> Generator[_Timed, None, None]:
    """(start, end, frame) from the first frame at or after ``from_s``, starts never falling; ends as the file has them.

    Opens the file, and closes it at the end. Seeks where that is exact, else decodes from the first frame.

    on_skip: called for each frame that is decoded on the way; what it raises passes through.
    """
    with opened(file) as container:
        stream = video_stream(container, file)
        if from_s <= origin_of(stream) or _goes_before(container, stream, from_s, file):
            yield from timed_from(container, stream, from_s, file, on_skip)
            return
    with opened(file) as container:  # anew: where seeking was late, it may also be late for the first frame
        yield from timed_from(container, video_stream(container, file), from_s, file, on_skip)


def timed_from(
    container: InputContainer,
    stream: VideoStream,
    from_s: Fraction,
    file: MediaFile,
    on_skip: Callable[[], None] | None = None,
) -> Iterator[_Timed]:
    """As ``timed_video``, reading on from where the container is."""
    for timed in _timed(container, stream, file):
        if timed[0] >= from_s:
            yield timed
        elif on_skip is not None:
            on_skip()


def _goes_before(container: InputContainer, stream: VideoStream, from_s: Fraction, file: MediaFile) -> bool:
    """Whether the container went to a place from where the first frame that decodes is not later than ``from_s``."""
    if kind_of(container) not in SEEKABLE:
        return False
    for back_s in SEEK_BACK_S:
        target = from_s - back_s
        if target <= origin_of(stream) or not seek(container, stream, target):
            return False
        first = None
        with suppress(RequestError):  # nothing decodes from there
            first = next(_timed(container, stream, file), None)
        if first is not None and first[0] <= from_s and first[2].pts is not None:
            return seek(container, stream, target)
    return False


def kind_of(container: InputContainer) -> str:
    """The first of the names that FFmpeg has for a container: mov, matroska, avi."""
    return container.format.name.split(",")[0]


def _timed(container: InputContainer, stream: VideoStream, file: MediaFile) -> Iterator[_Timed]:
    base, origin, rates = time_base(stream), origin_of(stream), rates_of(stream)
    counts_frames = kind_of(container) == "avi"  # no timestamps, only an order
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
