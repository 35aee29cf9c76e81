"""Reference clips: a file or frames in memory, read one frame at a time and never held as a whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path
from typing import BinaryIO, Protocol

import av
import numpy as np
import torch
from av.container import InputContainer
from av.video.stream import VideoStream
from torch import Tensor

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media import colours, decode, soundtrack
from comfyui_h3.h3core.media.notices import Notices
from comfyui_h3.h3core.media.pictures import picture_from_images
from comfyui_h3.h3core.types import Audio

MAX_FPS_DENOMINATOR = 10_000  # 24000/1001 stays exact; a float such as 29.97 becomes 2997/100
MAX_SECONDS_DENOMINATOR = 1_000_000
MAX_FPS = 1000
EARLY_END_S = 0.5
FOREVER = Fraction(10**9)  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipInfo:
    """What a clip is. width, height: as displayed, turned upright, in square pixels.

    duration_s: of the part that is used, as the file states it. fps: the average rate. num_bytes, container and codecs
    are None for a clip in memory; audio_codec is None without sound.
    """

    width: int
    height: int
    duration_s: float
    fps: Fraction
    has_sound: bool
    num_bytes: int | None = None
    container: str | None = None
    video_codec: str | None = None
    audio_codec: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimedFrame:
    """One frame and when it shows, in seconds after the clip's first frame; ``end`` may equal ``start``."""

    start: Fraction
    end: Fraction
    convert: Callable[[], np.ndarray]

    @property
    def pixels(self) -> np.ndarray:
        """(h, w, 3) uint8 RGB, upright, converted in each call; a frame that nobody asks costs its decoding alone.

        Pixels may not be square: ``ClipInfo`` has the size for display. Raises RequestError for NaN, and for colours
        that cannot be converted.
        """
        return self.convert()


class Clip(Protocol):
    """Pictures with their times, and perhaps sound."""

    @property
    def info(self) -> ClipInfo: ...

    @property
    def notices(self) -> tuple[str, ...]:
        """What was odd about this clip, or a part trimmed from it, when it was last read: sentences without a full
        stop, each once."""

    def notice_sound(self, sentence: str) -> None:
        """Adds what was odd about the sound to whom it was given."""

    def frames(self) -> Generator[TimedFrame, None, None]:
        """All frames in order, one at a time; each frame's end is the next one's start. Close it to stop early."""

    def sound(self, max_duration_s: float, *, start_s: float = 0.0) -> Audio | None:
        """The soundtrack from ``start_s`` on, at most int(max_duration_s * rate) samples; None without one."""

    def trimmed(self, start_s: float, duration_s: float | None = None) -> Clip:
        """The part of this clip from ``start_s`` on, picture and sound alike. Raises RequestError past the end."""


class FileClip:
    """A video file, or the part of it that a host's VIDEO was trimmed to.

    source: a path, the bytes of a file, or an open binary stream, which is read to its end here. start_s: seconds after
    the first frame; the clip begins with the first frame at or after it. duration_s: None for all of the rest.

    The file is opened when something is asked. A file that cannot be used raises RequestError, which names it.
    """

    def __init__(
        self, source: str | Path | bytes | BinaryIO, *, start_s: float = 0.0, duration_s: float | None = None
    ) -> None:
        self._start, self._duration = _window(start_s, duration_s)
        if isinstance(source, str | Path):
            path = Path(source)
            self._file = decode.MediaFile(source=path, name=path.name, notices=Notices())
        else:
            content = source if isinstance(source, bytes) else _whole(source)
            self._file = decode.MediaFile(source=content, name="the video", notices=Notices())

    @property
    def info(self) -> ClipInfo:
        return self._opening[0]

    @property
    def notices(self) -> tuple[str, ...]:
        return self._file.notices.all

    def notice_sound(self, sentence: str) -> None:
        self._file.notices.add("audio", sentence)

    def trimmed(self, start_s: float, duration_s: float | None = None) -> FileClip:
        start, duration = _window(start_s, duration_s)
        if self._duration is not None:
            if start >= self._duration:
                raise _past_the_end(self._file.name, start_s, float(self._duration))
            rest = self._duration - start
            duration = rest if duration is None else min(rest, duration)
        part = FileClip(self._file.source)
        part._file, part._start, part._duration = self._file, self._start + start, duration
        return part

    def frames(self) -> Generator[TimedFrame, None, None]:
        info, origin, turn = self._opening
        self._file.notices.restart("video")
        with decode.opened(self._file) as container:
            stream = decode.video_stream(container, self._file)
            begin = self._begin(stream)
            clip_end = FOREVER if self._duration is None else begin + self._duration - origin
            held: av.VideoFrame | None = None
            start = end = Fraction(0)
            for time, time_end, frame in decode.timed_video(container, stream, begin, self._file):
                next_start = max(start, time - origin)
                if held is not None:
                    yield self._timed(start, min(next_start, clip_end), held, turn)
                if next_start >= clip_end:
                    return
                held, start, end = frame, next_start, max(next_start, time_end - origin)
            if held is not None:
                yield self._timed(start, min(end, clip_end), held, turn)
                if info.duration_s - float(end) > EARLY_END_S:
                    name, length = self._file.name, float(origin - decode.origin_of(stream) + end)
                    sentence = f"{name} ends after {length:.2f} s, earlier than it states: it is damaged or cut off"
                    self._file.notices.add("video", sentence)

    def _timed(self, start: Fraction, end: Fraction, frame: av.VideoFrame, turn: colours.Turn) -> TimedFrame:
        return TimedFrame(start=start, end=end, convert=partial(colours.upright, frame, turn, self._file))

    def sound(self, max_duration_s: float, *, start_s: float = 0.0) -> Audio | None:
        if start_s:
            return self.trimmed(start_s).sound(max_duration_s)
        info, origin, _ = self._opening
        self._file.notices.restart("audio")
        if not info.has_sound:
            return None
        with decode.opened(self._file) as container:
            stream = decode.sound_stream(container)
            assert stream is not None  # has_sound
            length = exact_seconds(max_duration_s)
            if self._duration is not None:
                begin = self._begin(decode.video_stream(container, self._file))
                length = min(length, begin + self._duration - origin)
            num_samples = int(length * soundtrack.SOUND_RATE)
            samples = soundtrack.stereo_sound(container, stream, origin, num_samples, self._file)
        if samples.shape[1] == 0:
            name = self._file.name
            self.notice_sound(f"the soundtrack of {name} is silent where its picture is used: it counts as none")
            return None
        return Audio(samples=torch.from_numpy(np.ascontiguousarray(samples)), sample_rate=soundtrack.SOUND_RATE)

    @cached_property
    def _opening(self) -> tuple[ClipInfo, Fraction, colours.Turn]:
        """What the clip is, the time of its first frame on the clock of the file, and how its frames are turned."""
        with decode.opened(self._file) as container:
            duration_s = decode.duration_of(container, decode.video_stream(container, self._file))
        with decode.opened(self._file) as container:  # again: the length may have to be read
            stream = decode.video_stream(container, self._file)
            first = next(decode.timed_video(container, stream, self._begin(stream), self._file), None)
            if first is None:
                if self._start == 0:
                    raise RequestError(f"{self._file.name} has no frames; {decode.REMEDY}")
                raise _past_the_end(self._file.name, float(self._start), duration_s)
            origin, _, frame = first
            colours.notice_hdr(stream, self._file)
            turn = colours.turn_of(frame)
            left_s = max(0.0, duration_s - float(origin - decode.origin_of(stream)))
            size = colours.display_size(stream, frame, turn)
            return self._info(container, stream, size, left_s), origin, turn

    def _info(self, container: InputContainer, stream: VideoStream, size: tuple[int, int], left_s: float) -> ClipInfo:
        sound = decode.sound_stream(container)
        return ClipInfo(
            width=size[0],
            height=size[1],
            duration_s=left_s if self._duration is None else min(left_s, float(self._duration)),
            fps=decode.rates_of(stream)[0],
            has_sound=sound is not None,
            num_bytes=self._file.num_bytes,
            container=container.format.name,
            video_codec=decode.codec_name(stream),
            audio_codec=None if sound is None else decode.codec_name(sound),
        )

    def _begin(self, stream: VideoStream) -> Fraction:
        """Where the window starts, on the clock of the file."""
        return decode.origin_of(stream) + self._start


class MemoryClip:
    """Frames that are already decoded, at a constant rate.

    pixels: (F, H, W, C), uint8 or floats in [0, 1], C as ``picture_from_images`` takes it. fps: their rate. audio: the
    soundtrack from the first frame on, at its own rate. Raises RequestError for another shape and an impossible rate;
    for NaN in a frame when the pixels of that frame are read.
    """

    def __init__(self, pixels: Tensor, fps: Fraction, audio: Audio | None = None) -> None:
        if pixels.ndim != 4 or 0 in pixels.shape:
            raise RequestError(
                f"the video has the shape {tuple(pixels.shape)}; it must be (frames, height, width, channels)"
            )
        if not (math.isfinite(fps) and 0 < fps <= MAX_FPS):
            raise RequestError(f"{fps} frames per second is not possible; use a rate above 0, up to {MAX_FPS}")
        self._pixels, self._audio = pixels, audio
        self._fps = Fraction(fps).limit_denominator(MAX_FPS_DENOMINATOR)
        self._notices = Notices()

    @property
    def info(self) -> ClipInfo:
        num_frames, height, width, _ = self._pixels.shape
        return ClipInfo(
            width=width,
            height=height,
            duration_s=float(num_frames / self._fps),
            fps=self._fps,
            has_sound=self._audio is not None,
        )

    @property
    def notices(self) -> tuple[str, ...]:
        return self._notices.all

    def notice_sound(self, sentence: str) -> None:
        self._notices.add("audio", sentence)

    def trimmed(self, start_s: float, duration_s: float | None = None) -> MemoryClip:
        start, duration = _window(start_s, duration_s)
        first = math.ceil(start * self._fps)
        if first >= len(self._pixels):
            raise _past_the_end("the video", start_s, float(len(self._pixels) / self._fps))
        last = len(self._pixels)
        if duration is not None:
            last = max(first + 1, min(last, math.ceil((start + duration) * self._fps)))
        audio = self._audio
        if audio is not None:
            bounds = [round(index / self._fps * audio.sample_rate) for index in (first, last)]
            audio = replace(audio, samples=audio.samples[..., bounds[0] : bounds[1]])
        part = MemoryClip(self._pixels[first:last], self._fps, audio)
        part._notices = self._notices
        return part

    def frames(self) -> Generator[TimedFrame, None, None]:
        self._notices.restart("video")
        for index in range(len(self._pixels)):
            yield TimedFrame(
                start=index / self._fps, end=(index + 1) / self._fps, convert=partial(self._converted, index)
            )

    def _converted(self, index: int) -> np.ndarray:
        pixels, notices = picture_from_images(self._pixels[index], what=f"frame {index} of the video")
        if notices and not self._notices.has("video"):
            self._notices.add("video", f"{'; '.join(notices)}; the other frames are treated alike")
        return pixels.numpy()

    def sound(self, max_duration_s: float, *, start_s: float = 0.0) -> Audio | None:
        if start_s:
            return self.trimmed(start_s).sound(max_duration_s)
        self._notices.restart("audio")
        if self._audio is None:
            return None
        num_samples = int(max_duration_s * self._audio.sample_rate)
        return replace(self._audio, samples=self._audio.samples[..., :num_samples])


def exact_seconds(value: float) -> Fraction:
    """The number that was meant: 1/10 for the float nearest to it, which lies above, past a frame at that time."""
    return Fraction(value).limit_denominator(MAX_SECONDS_DENOMINATOR)


def _whole(stream: BinaryIO) -> bytes:
    stream.seek(0)
    return stream.read()


def _window(start_s: float, duration_s: float | None) -> tuple[Fraction, Fraction | None]:
    """Both in exact seconds. Raises RequestError for impossible ones."""
    if not (math.isfinite(start_s) and start_s >= 0):
        raise RequestError(f"a start at {start_s} s is not possible; use 0 or more seconds")
    if duration_s is not None and not (math.isfinite(duration_s) and duration_s > 0):
        raise RequestError(f"a duration of {duration_s} s is not possible; use a positive number of seconds")
    return exact_seconds(start_s), None if duration_s is None else exact_seconds(duration_s)


def _past_the_end(name: str, start_s: float, duration_s: float) -> RequestError:
    return RequestError(
        f"a start at {start_s:g} s is past the last frame of {name}, which is {duration_s:.3g} s long; choose an "
        "earlier one"
    )
