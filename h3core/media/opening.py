"""What a media file is: found once for a clip and all parts trimmed from it, and anew when the file was changed."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media import colours, decode


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A file as its header and its first frame show it.

    info: of the whole file. first_s: the time of its first frame on its clock, from where starts of clips count.
    aspect: width over height of a pixel, None or 0 where unknown. turn: of all frames.
    """

    info: ClipInfo
    first_s: Fraction
    aspect: Fraction | None
    turn: colours.Turn


class OpenedFile:
    """Answers about a file, each found when it is first asked. What is wrong with the file raises RequestError."""

    def __init__(self, file: decode.MediaFile) -> None:
        self.file = file
        self._stamp: tuple[int, ...] | None = None
        self._opening: Opening | None = None
        self._measured_s: float | None = None
        self._first_s: dict[Fraction, Fraction] = {}

    def opening(self) -> Opening:
        stamp = self.file.stamp()
        if self._opening is None or stamp != self._stamp:  # another file took its place
            self.file.notices.restart("file")
            self._opening, self._measured_s, self._first_s = None, None, {}
            self._opening, self._stamp = self._open(stamp[0]), stamp
        return self._opening

    def length_s(self, start: Fraction) -> float:
        """Seconds from the first frame to the end, as the file states them.

        Where a clip from ``start`` would lie past that, as its packets add up to, read once, where that is more.
        """
        stated_s = self.opening().info.duration_s
        if start < stated_s:
            return stated_s
        if self._measured_s is None:
            with decode.opened(self.file) as container:
                self._measured_s = decode.measured_duration(container, decode.video_stream(container, self.file))
        return max(stated_s, self._measured_s)

    def first_s(self, start: Fraction) -> Fraction | None:
        """Time of the first frame at or after ``start`` seconds into the file, on its clock; None without one.

        Decodes up to that frame, unless ``note_first`` told it.
        """
        opening = self.opening()
        if start == 0:
            return opening.first_s
        if start not in self._first_s:
            frames = decode.timed_video(self.file, opening.first_s + start)
            first = next(frames, None)
            frames.close()
            if first is None:
                return None
            self._first_s[start] = first[0]
        return self._first_s[start]

    def note_first(self, start: Fraction, time: Fraction) -> None:
        """Keeps what a reader found, so that ``first_s`` need not read."""
        self._first_s[start] = time

    def _open(self, num_bytes: int) -> Opening:
        file = self.file
        with decode.opened(file) as container:
            duration_s = decode.duration_of(container, decode.video_stream(container, file))
        with decode.opened(file) as container:  # again: the length may have to be read
            stream = decode.video_stream(container, file)
            origin = decode.origin_of(stream)
            first = next(decode.timed_from(container, stream, origin, file), None)
            if first is None:
                raise RequestError(f"{file.name} has no frames; {decode.REMEDY}")
            first_s, _, frame = first
            colours.notice_hdr(stream, file)
            turn = colours.turn_of(frame)
            aspect = None if stream.sample_aspect_ratio is None else Fraction(stream.sample_aspect_ratio)
            width, height = colours.display_size(frame, aspect, turn)
            sound = decode.sound_stream(container)
            info = ClipInfo(
                width=width,
                height=height,
                duration_s=max(0.0, duration_s - float(first_s - origin)),
                fps=decode.rates_of(stream)[0],
                has_sound=sound is not None,
                num_bytes=num_bytes,
                container=container.format.name,
                video_codec=decode.codec_name(stream),
                audio_codec=None if sound is None else decode.codec_name(sound),
            )
            return Opening(info=info, first_s=first_s, aspect=aspect, turn=turn)
