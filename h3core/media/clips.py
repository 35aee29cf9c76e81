"""Reference clips: a file or frames in memory, streamed and brought to 24 frames per second on their own canvas.

A clip is never held as a whole but for its result, the uint8 frames at 24 fps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import av
import numpy as np
import torch
from av.video.stream import VideoStream
from torch import Tensor

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media import decode
from comfyui_h3.h3core.media.canvas import FPS, FRAME_STEP, MIN_FRAMES, SHORT_EDGE, canvas_for_ratio, check_ratio
from comfyui_h3.h3core.media.pictures import picture_from_images, resize
from comfyui_h3.h3core.types import Audio, Progress

log = logging.getLogger(__name__)

MIN_REFERENCE_FRAMES = 22
ENCODER_STEP = 12  # the encoder sees 2 frames per second
MAX_FPS_DENOMINATOR = 10_000  # 24000/1001 stays exact; a float such as 29.97 becomes 2997/100
MAX_FPS = 1000
WASTE = 1.1  # of a clip that is shorter than it states: more memory in vain is given back
FINE_TICK = Fraction(1, 4)  # of a frame: a coarser clock says nothing about a rate
EARLY_END_S = 0.5
FOREVER = Fraction(10**9)  # seconds
HALF = Fraction(1, 2)


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


class TimedFrame(NamedTuple):
    """One frame and the time in which it shows, in seconds after the clip's first frame; ``end`` may equal ``start``.

    pixels: (h, w, 3) uint8 RGB, upright. Pixels may not be square: ``ClipInfo`` has the size for display.
    """

    start: Fraction
    end: Fraction
    pixels: np.ndarray


class Clip(Protocol):
    """Pictures with their times, and perhaps sound."""

    @property
    def info(self) -> ClipInfo: ...

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
        _check_window(start_s, duration_s)
        if isinstance(source, str | Path):
            self._source: Path | bytes = Path(source)
            self._name = self._source.name
        else:
            self._source = source if isinstance(source, bytes) else _whole(source)
            self._name = "the video"
        self._start_s, self._duration_s = start_s, duration_s

    @property
    def info(self) -> ClipInfo:
        return self._opening[0]

    def trimmed(self, start_s: float, duration_s: float | None = None) -> FileClip:
        _check_window(start_s, duration_s)
        if self._duration_s is not None:
            if start_s >= self._duration_s:
                raise _past_the_end(self._name, start_s, self._duration_s)
            rest = self._duration_s - start_s
            duration_s = rest if duration_s is None else min(rest, duration_s)
        return FileClip(self._source, start_s=self._start_s + start_s, duration_s=duration_s)

    def frames(self) -> Generator[TimedFrame, None, None]:
        info, origin, turn = self._opening
        with decode.opened(self._source, self._name) as container:
            stream = decode.video_stream(container, self._name)
            end = FOREVER if self._duration_s is None else self._begin(stream) + Fraction(self._duration_s) - origin
            rates, tick = decode.rates_of(stream), Fraction(stream.time_base or 0)
            step = 1 / rates[0]
            held: av.VideoFrame | None = None
            start, length = Fraction(0), step
            for time, duration, frame in decode.timed_video(container, stream, self._begin(stream), self._name):
                next_start = max(start, _snapped(time - origin, tick, rates))
                if held is not None:
                    yield TimedFrame(start, min(next_start, end), decode.upright(held, turn, self._name))
                if next_start >= end:
                    return
                held, start, length = frame, next_start, duration or step
            if held is not None:
                next_start = _snapped(start + length, tick, rates)
                yield TimedFrame(start, min(next_start, end), decode.upright(held, turn, self._name))
                if info.duration_s - float(next_start) > EARLY_END_S:
                    log.warning(
                        "%s states %.2f s, but its pictures end after %.2f s: it is damaged or cut off",
                        self._name,
                        info.duration_s,
                        float(next_start),
                    )

    def sound(self, max_duration_s: float, *, start_s: float = 0.0) -> Audio | None:
        if start_s:
            return self.trimmed(start_s).sound(max_duration_s)
        info, origin, _ = self._opening
        if not info.has_sound:
            return None
        with decode.opened(self._source, self._name) as container:
            stream = decode.sound_stream(container)
            assert stream is not None  # has_sound
            length = Fraction(max_duration_s)
            if self._duration_s is not None:
                begin = self._begin(decode.video_stream(container, self._name))
                length = min(length, begin + Fraction(self._duration_s) - origin)
            num_samples = int(length * decode.SOUND_RATE)
            samples = decode.stereo_sound(container, stream, origin, num_samples, self._name)
        if samples.shape[1] == 0:
            log.warning("the soundtrack of %s is silent where its picture is used: it counts as none", self._name)
            return None
        return Audio(samples=torch.from_numpy(np.ascontiguousarray(samples)), sample_rate=decode.SOUND_RATE)

    @cached_property
    def _opening(self) -> tuple[ClipInfo, Fraction, decode.Turn]:
        """What the clip is, the time of its first frame on the clock of the file, and how its frames are turned."""
        with decode.opened(self._source, self._name) as container:
            duration_s = decode.duration_of(container, decode.video_stream(container, self._name))
        with decode.opened(self._source, self._name) as container:  # again: the length may have to be read
            stream = decode.video_stream(container, self._name)
            timed = next(decode.timed_video(container, stream, self._begin(stream), self._name), None)
            if timed is None:
                if self._start_s == 0:
                    raise RequestError(f"{self._name} has no frames; {decode.REMEDY}")
                raise _past_the_end(self._name, self._start_s, duration_s)
            origin, _, frame = timed
            left_s = max(0.0, duration_s - float(origin - decode.origin_of(stream)))
            transfer = decode.HDR_TRANSFERS.get(stream.codec_context.color_trc)
            if transfer:
                log.warning("%s is HDR (%s), which is not tone-mapped: its colours look flat", self._name, transfer)
            turn = decode.turn_of(frame)
            width, height = decode.display_size(stream, frame, turn)
            sound = decode.sound_stream(container)
            info = ClipInfo(
                width=width,
                height=height,
                duration_s=left_s if self._duration_s is None else min(left_s, self._duration_s),
                fps=decode.rates_of(stream)[0],
                has_sound=sound is not None,
                num_bytes=len(self._source) if isinstance(self._source, bytes) else self._source.stat().st_size,
                container=container.format.name,
                video_codec=decode.codec_name(stream),
                audio_codec=None if sound is None else decode.codec_name(sound),
            )
            return info, origin, turn

    def _begin(self, stream: VideoStream) -> Fraction:
        """Where the window starts, on the clock of the file."""
        return decode.origin_of(stream) + Fraction(self._start_s)


class MemoryClip:
    """Frames that are already decoded, at a constant rate.

    pixels: (F, H, W, C), uint8 or floats in [0, 1], C as ``picture_from_images`` takes it. fps: their rate. audio: the
    soundtrack from the first frame on, at its own rate. Raises RequestError for another shape and an impossible rate;
    for NaN in a frame when that frame is read.
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

    def trimmed(self, start_s: float, duration_s: float | None = None) -> MemoryClip:
        _check_window(start_s, duration_s)
        first = math.ceil(Fraction(start_s) * self._fps)
        if first >= len(self._pixels):
            raise _past_the_end("the video", start_s, float(len(self._pixels) / self._fps))
        last = len(self._pixels)
        if duration_s is not None:
            last = max(first + 1, min(last, math.ceil((Fraction(start_s) + Fraction(duration_s)) * self._fps)))
        audio = self._audio
        if audio is not None:
            bounds = [round(index / self._fps * audio.sample_rate) for index in (first, last)]
            audio = replace(audio, samples=audio.samples[..., bounds[0] : bounds[1]])
        return MemoryClip(self._pixels[first:last], self._fps, audio)

    def frames(self) -> Generator[TimedFrame, None, None]:
        for index, frame in enumerate(self._pixels):
            pixels, notices = picture_from_images(frame, what=f"frame {index} of the video")
            if notices and index == 0:
                log.warning("%s The other frames are treated alike.", " ".join(notices))
            yield TimedFrame(index / self._fps, (index + 1) / self._fps, pixels.numpy())

    def sound(self, max_duration_s: float, *, start_s: float = 0.0) -> Audio | None:
        if start_s:
            return self.trimmed(start_s).sound(max_duration_s)
        if self._audio is None:
            return None
        num_samples = int(max_duration_s * self._audio.sample_rate)
        return replace(self._audio, samples=self._audio.samples[..., :num_samples])


def conform(
    clip: Clip,
    *,
    max_frames: int,
    start_s: float = 0.0,
    short_edge: float = SHORT_EDGE,
    on_frame: Progress | None = None,
) -> Tensor:
    """(n, H, W, 3) uint8, n <= max_frames: the clip at 24 frames per second on the canvas of its own display ratio.

    A frame that starts at t seconds fills the slots from floor(t * 24 + 1/2) to that of the next frame, the last one to
    that of its end; decoding stops when max_frames are full. start_s: seconds into the clip. short_edge: of the canvas.

    on_frame: called with (frames done, frames expected); what it raises closes the clip and passes through. Raises
    RequestError for a ratio outside 1:4..4:1, a clip that does not decode, and one too short for a single frame.
    """
    if max_frames < 1:
        raise RequestError(f"{max_frames} frames of a reference video are not possible; use 1 or more")
    if start_s:
        clip = clip.trimmed(start_s)
    report = on_frame or _ignore
    info = clip.info
    check_ratio(info.width, info.height, "the reference video")
    width, height = canvas_for_ratio(info.width, info.height, short_edge)
    expected = min(max_frames, max(1, _slot(Fraction(info.duration_s))))
    conformed = torch.empty(expected, height, width, 3, dtype=torch.uint8)
    num_done = 0
    report(0, expected)
    with closing(clip.frames()) as frames:
        for frame in frames:
            end = min(_slot(frame.end), max_frames)
            if end > len(conformed):  # the file is longer than it states
                conformed = _grown(conformed, min(max_frames, max(end, 2 * len(conformed))))
            if end > num_done:
                conformed[num_done:end] = resize(torch.from_numpy(frame.pixels), width, height)
                num_done = end
            report(num_done, max(expected, num_done))
            if num_done == max_frames:
                break
    if num_done == 0:
        raise RequestError("the reference video is shorter than one frame at 24 per second; use a longer clip")
    conformed = conformed[:num_done]
    return conformed.clone() if conformed.untyped_storage().nbytes() > WASTE * conformed.nbytes else conformed


def check_reference_frames(num_frames: int) -> None:
    """Raises RequestError when a conformed clip has fewer frames than the video VAE needs of a reference."""
    if num_frames < MIN_REFERENCE_FRAMES:
        raise RequestError(
            f"a reference video needs at least {MIN_REFERENCE_FRAMES} frames at {FPS} fps "
            f"({MIN_REFERENCE_FRAMES / FPS:.2f} s), this one has {num_frames} ({num_frames / FPS:.2f} s); "
            "use a longer clip, or one of its frames as a reference image"
        )


def vae_frames(num_frames: int) -> int:
    """How many of the frames of a conformed clip the video VAE encodes: the largest 17k + 5, k >= 1."""
    return max(1, (num_frames - MIN_FRAMES) // FRAME_STEP) * FRAME_STEP + MIN_FRAMES


def encoder_frames(frames: Tensor) -> tuple[Tensor, tuple[float, ...]]:
    """What the text encoder sees of a conformed clip (n, H, W, 3): 2 frames per second, and the time of each block.

    Gives (m, H, W, 3), m = ceil(n / 12), a view, and the mean time in seconds of every two of them; an odd last frame
    counts twice. The prompt shows a time with one decimal, ``f"{time:.1f}"``.
    """
    sampled = frames[::ENCODER_STEP]
    times = [index * ENCODER_STEP / FPS for index in range(len(sampled))]
    times += times[-1:] * (len(times) % 2)
    return sampled, tuple((first + second) / 2 for first, second in zip(times[::2], times[1::2], strict=True))


def _ignore(done: int, total: int) -> None:
    """Progress that nobody asked for."""


def _slot(time: Fraction) -> int:
    return math.floor(time * FPS + HALF)


def _snapped(time: Fraction, tick: Fraction, rates: tuple[Fraction, ...]) -> Fraction:
    """``time`` as a whole number of frames, where a clock that counts in ``tick`` seconds cannot tell them apart.

    Matroska rounds to milliseconds, and a frame on the edge of two slots would fall into the wrong one.
    """
    for rate in rates:
        exact = round(time * rate) / rate
        if tick * rate <= FINE_TICK and abs(exact - time) <= tick:
            return exact
    return time


def _grown(frames: Tensor, num_frames: int) -> Tensor:
    grown = frames.new_empty(num_frames, *frames.shape[1:])
    grown[: len(frames)] = frames
    return grown


def _whole(stream: BinaryIO) -> bytes:
    stream.seek(0)
    return stream.read()


def _check_window(start_s: float, duration_s: float | None) -> None:
    if not (math.isfinite(start_s) and start_s >= 0):
        raise RequestError(f"a start at {start_s} s is not possible; use 0 or more seconds")
    if duration_s is not None and not (math.isfinite(duration_s) and duration_s > 0):
        raise RequestError(f"a duration of {duration_s} s is not possible; use a positive number of seconds")


def _past_the_end(name: str, start_s: float, duration_s: float) -> RequestError:
    return RequestError(
        f"a start at {start_s:g} s is past the last frame of {name}, which is {duration_s:.3g} s long; choose an "
        "earlier one"
    )
