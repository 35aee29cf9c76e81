"""Reference clips: a file or frames in memory, read one frame at a time and never held as a whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from copy import copy
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import torch
from torch import Tensor

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media import colours, decode, soundtrack
from comfyui_h3.h3core.media.notices import Notices
from comfyui_h3.h3core.media.opening import ClipInfo, OpenedFile
from comfyui_h3.h3core.media.pictures import picture_from_images
from comfyui_h3.h3core.media.seconds import exact, exact_seconds, is_number, past_the_end, window
from comfyui_h3.h3core.types import Audio

MAX_FPS_DENOMINATOR = 10_000  # 24000/1001 stays exact; a float such as 29.97 becomes 2997/100
MIN_FPS, MAX_FPS = Fraction(1, 1000), 1000
EARLY_END_S = 0.5
FOREVER = Fraction(10**9)  # seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimedFrame:
    """One frame and when it shows, in seconds after the clip's first frame; ``end`` may equal ``start``.

    size: (width, height) for display, upright and in square pixels; that of the clip, unless its file changes it.
    """

    start: Fraction
    end: Fraction
    size: tuple[int, int]
    convert: Callable[[], np.ndarray]

    @property
    def pixels(self) -> np.ndarray:
        """(h, w, 3) uint8 RGB, upright, converted in each call; a frame that nobody asks costs its decoding alone.

        Pixels may not be square. Raises RequestError for NaN, and for colours that cannot be converted.
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

    def frames(self, on_skip: Callable[[], None] | None = None) -> Generator[TimedFrame, None, None]:
        """All frames in order, one at a time; each frame's end is the next one's start. Close it to stop early.

        on_skip: called for each frame that has to be decoded before the first one; what it raises passes through.
        """

    def sound(self, max_duration_s: float, *, start_s: float = 0.0) -> Audio | None:
        """The soundtrack from ``start_s`` on, at most int(max_duration_s * rate) samples; None without one."""

    def trimmed(self, start_s: float, duration_s: float | None = None) -> Clip:
        """The part of this clip from ``start_s`` on, picture and sound alike. Raises RequestError past the end."""


class FileClip:
    """A video file, or the part of it that a host's VIDEO was trimmed to.

    source: a path, the bytes of a file, or an open binary stream, which is read to its end here. start_s: seconds after
    the first frame; the clip begins with the first frame at or after it. duration_s: None for all of the rest.

    The file is opened when something is asked, and what was found then is kept, also for parts of the clip. A file that
    was replaced since is found anew. One that cannot be used raises RequestError, which names it.
    """

    def __init__(
        self, source: str | Path | bytes | BinaryIO, *, start_s: float = 0.0, duration_s: float | None = None
    ) -> None:
        self._start, self._duration = window(start_s, duration_s)
        if isinstance(source, str | Path):
            path = Path(source)
            file = decode.MediaFile(source=path, name=path.name, notices=Notices())
        else:
            content = source if isinstance(source, bytes) else _whole(source)
            file = decode.MediaFile(source=content, name="the video", notices=Notices())
        self._file, self._opened = file, OpenedFile(file)

    @property
    def info(self) -> ClipInfo:
        """Of the part that is used. Decodes the first frame of the file only. Raises RequestError past the end."""
        opening = self._opened.opening()
        left_s = self._opened.length_s(self._start) - float(self._start)
        if self._start and left_s <= 0:
            raise self._past_the_end()
        duration_s = left_s if self._duration is None else min(left_s, float(self._duration))
        return replace(opening.info, duration_s=duration_s)

    @property
    def notices(self) -> tuple[str, ...]:
        return self._file.notices.all

    def notice_sound(self, sentence: str) -> None:
        self._file.notices.add("audio", sentence)

    def trimmed(self, start_s: float, duration_s: float | None = None) -> FileClip:
        start, duration = window(start_s, duration_s)
        if self._duration is not None:
            if start >= self._duration:
                raise past_the_end(self._file.name, start_s, float(self._duration))
            rest = self._duration - start
            duration = rest if duration is None else min(rest, duration)
        part = copy(self)
        part._start, part._duration = self._start + start, duration
        return part

    def frames(self, on_skip: Callable[[], None] | None = None) -> Generator[TimedFrame, None, None]:
        opening = self._opened.opening()
        stated_s = self.info.duration_s
        self._file.notices.restart("video")
        begin = opening.first_s + self._start
        origin: Fraction | None = None
        held: TimedFrame | None = None
        for time, time_end, frame in decode.timed_video(self._file, begin, on_skip):
            if origin is None:
                origin = time
                self._opened.note_first(self._start, origin)
                stated_s -= float(origin - begin)
            clip_end = FOREVER if self._duration is None else begin + self._duration - origin
            start = time - origin
            if held is not None:
                start = max(held.start, start)
                yield replace(held, end=min(start, clip_end))
            if start >= clip_end:
                return
            size = colours.display_size(frame, opening.aspect, opening.turn)
            if held is not None and size != held.size:
                sentence = f"{self._file.name} changes its size: all frames are brought to that of the first one used"
                self._file.notices.add("video", sentence)
            held = TimedFrame(
                start=start,
                end=min(max(start, time_end - origin), clip_end),
                size=size,
                convert=partial(colours.upright, frame, opening.turn, self._file),
            )
        if held is None or origin is None:
            raise self._past_the_end()
        yield held
        if stated_s - float(held.end) > EARLY_END_S:
            name, length_s = self._file.name, float(origin - opening.first_s + held.end)
            sentence = f"{name} ends after {length_s:.2f} s, earlier than it states: it is damaged or cut off"
            self._file.notices.add("video", sentence)

    def sound(self, max_duration_s: float, *, start_s: float = 0.0) -> Audio | None:
        if start_s != 0:
            return self.trimmed(start_s).sound(max_duration_s)
        opening = self._opened.opening()
        self._file.notices.restart("audio")
        if not opening.info.has_sound:
            return None
        origin = self._opened.first_s(self._start)
        if origin is None:
            raise self._past_the_end()
        length = exact_seconds(max_duration_s)
        if self._duration is not None:
            length = min(length, opening.first_s + self._start + self._duration - origin)
        num_samples = int(length * soundtrack.SOUND_RATE)
        with decode.opened(self._file) as container:
            stream = decode.sound_stream(container)
            if stream is None:  # replaced a moment ago
                return None
            samples = soundtrack.stereo_sound(container, stream, origin, num_samples, self._file)
        if samples.shape[1] == 0:
            name = self._file.name
            self.notice_sound(f"the soundtrack of {name} is silent where its picture is used: it counts as none")
            return None
        return Audio(samples=torch.from_numpy(np.ascontiguousarray(samples)), sample_rate=soundtrack.SOUND_RATE)

    def _past_the_end(self) -> RequestError:
        return past_the_end(self._file.name, float(self._start), self._opened.length_s(self._start))


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
        if not (is_number(fps) and MIN_FPS <= fps <= MAX_FPS):
            raise RequestError(f"{fps!s} frames per second is not possible; use {float(MIN_FPS):g} to {MAX_FPS}")
        self._pixels, self._audio = pixels, audio
        self._fps = exact(fps, MAX_FPS_DENOMINATOR)
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
        start, duration = window(start_s, duration_s)
        first = math.ceil(start * self._fps)
        if first >= len(self._pixels):
            raise past_the_end("the video", start_s, float(len(self._pixels) / self._fps))
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

    def frames(self, on_skip: Callable[[], None] | None = None) -> Generator[TimedFrame, None, None]:
        self._notices.restart("video")
        num_frames, height, width, _ = self._pixels.shape
        for index in range(num_frames):
            yield TimedFrame(
                start=index / self._fps,
                end=(index + 1) / self._fps,
                size=(width, height),
                convert=partial(self._converted, index),
            )

    def _converted(self, index: int) -> np.ndarray:
        pixels, notices = picture_from_images(self._pixels[index], what=f"frame {index} of the video")
        if notices and not self._notices.has("video"):
            self._notices.add("video", f"{'; '.join(notices)}; the other frames are treated alike")
        return pixels.numpy()

    def sound(self, max_duration_s: float, *, start_s: float = 0.0) -> Audio | None:
        if start_s != 0:
            return self.trimmed(start_s).sound(max_duration_s)
        self._notices.restart("audio")
        if self._audio is None:
            return None
        num_samples = int(max_duration_s * self._audio.sample_rate)
        return replace(self._audio, samples=self._audio.samples[..., :num_samples])


def _whole(stream: BinaryIO) -> bytes:
    try:
        stream.seek(0)
        return stream.read()
    except (OSError, ValueError) as error:  # ValueError: it was closed
        raise RequestError(
            f"the video cannot be read from its stream ({error}); load it again, or give the path of a file"
        ) from error
