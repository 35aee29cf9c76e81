"""What a prompt is written for: the mode, the length of the video, and the media that its labels count."""

from __future__ import annotations

from dataclasses import dataclass

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media.canvas import FPS, align_num_frames, check_num_frames, frames_for_duration
from comfyui_h3.h3core.prompt.findings import counted
from comfyui_h3.h3core.prompt.grammar import (
    ALIGNMENT,
    AUDIO,
    BASE_SECTIONS,
    FIRST,
    FIRST_FRAME_LINE,
    FIRST_LAST,
    LAST,
    MEDIA_KINDS,
    MODES,
    NUM_KEYFRAMES,
    PICTURE,
    REF2VA,
    T2VA,
    VIDEO,
)
from comfyui_h3.h3core.prompt.parse import parse
from comfyui_h3.h3core.types import EncodedMedia

AUTO = "auto"
NOUNS = {PICTURE: "picture", VIDEO: "video", AUDIO: "sound"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptContext:
    """mode: one of MODES. num_frames: 17k + 5 at 24 per second.

    Counts of media: None is not known; the modes without references know theirs. num_audios counts the soundtracks of
    videos as well, and ``soundtracks`` says which ``<Audio N>`` they are, where known: a prompt need not cite those.
    keyframes: frame numbers in the order of time; None are those that the mode is named for.
    Raises RequestError for values that contradict each other.
    """

    mode: str
    num_frames: int
    num_pictures: int | None = None
    num_videos: int | None = None
    num_audios: int | None = None
    soundtracks: tuple[int, ...] | None = None
    keyframes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise RequestError(f"mode={self.mode!r} does not exist; use one of {', '.join(MODES)}")
        check_num_frames(self.num_frames)
        if align_num_frames(self.num_frames) != self.num_frames:
            raise RequestError(
                f"{self.num_frames} frames are not 17k + 5; use {align_num_frames(self.num_frames)}, which will run"
            )
        for kind, given in zip(MEDIA_KINDS, (self.num_pictures, self.num_videos, self.num_audios), strict=True):
            if given is not None and (not isinstance(given, int) or isinstance(given, bool) or given < 0):
                raise RequestError(f"{given!r} is not a number of media; count the {kind} inputs from 0")
            if given is not None and self.mode in NUM_KEYFRAMES and not self._takes(kind, given):
                there = "none is" if given == 0 else f"{given} {'is' if given == 1 else 'are'}"
                more = " or more" if self.mode == FIRST_LAST and kind == PICTURE else ""
                raise RequestError(
                    f"mode={self.mode} takes {counted(self._num_wanted(kind), NOUNS[kind])}{more}, and {there} "
                    f"connected; choose the mode that fits the media ({REF2VA} for references)"
                )

    @property
    def duration_s(self) -> float:
        """Seconds of the video as it will run."""
        return self.num_frames / FPS

    @property
    def seconds(self) -> str:
        """The duration as a first line states it."""
        return f"{self.duration_s:.2f}"

    def attached(self, kind: str) -> int | None:
        """How many ``<kind N>`` there are; None when nobody said."""
        given = {PICTURE: self.num_pictures, VIDEO: self.num_videos, AUDIO: self.num_audios}[kind]
        return self._num_wanted(kind) if given is None and self.mode in NUM_KEYFRAMES else given

    @property
    def has_first_line(self) -> bool:
        """Whether the format knows a first line for these keyframes: only for the first and the last frame."""
        if self.mode not in (FIRST, FIRST_LAST, LAST):
            return False
        places = keyframe_places(self.mode, self.num_frames)
        return self.keyframes in (None, places) and self.attached(PICTURE) == len(places)

    @property
    def these_keyframes(self) -> str:
        """What messages call the keyframes."""
        number = self.attached(PICTURE)
        return "this keyframe" if number == 1 else f"these {number} keyframes"

    def accepts_seconds(self, text: str) -> bool:
        """Whether a first line may state this duration: the one that runs, or one that would be rounded up to it.

        The guide's own examples state the whole seconds that were asked for.
        """
        if text == self.seconds:
            return True
        if text != f"{float(text):.2f}":  # leading zeros
            return False
        try:
            return frames_for_duration(float(text)) == self.num_frames
        except RequestError:  # zero, or past the longest video
            return False

    def _num_wanted(self, kind: str) -> int:
        """What a mode without references is named for; first and last frame may have keyframes in between."""
        return NUM_KEYFRAMES[self.mode] if kind == PICTURE else 0

    def _takes(self, kind: str, number: int) -> bool:
        wanted = self._num_wanted(kind)
        return number == wanted or (self.mode == FIRST_LAST and kind == PICTURE and number > wanted)


def context_for(prompt: str, mode: str, num_frames: int, media: EncodedMedia | None = None) -> PromptContext:
    """The context of a prompt. mode: one of MODES or "auto"; num_frames off the grid of 17k + 5 is rounded up.

    Media know their own length. Raises RequestError when mode and media do not go together.
    """
    check_num_frames(num_frames)
    if media is None:
        mode = detect_mode(prompt) if mode == AUTO else mode
        return PromptContext(mode=mode, num_frames=align_num_frames(num_frames))
    fitting = modes_of(media)
    if mode != AUTO and mode not in fitting:
        raise RequestError(
            f"mode={mode}, but the connected media are for {' or '.join(fitting)}; use that, or disconnect them"
        )
    return PromptContext(
        mode=fitting[0] if mode == AUTO else mode,
        num_frames=media.request.num_frames,
        keyframes=None if media.task == REF2VA else _keyframes(media),
        num_pictures=media.num_pictures,
        num_videos=media.num_videos,
        num_audios=media.num_audios,
        soundtracks=soundtracks(media),
    )


def modes_of(media: EncodedMedia) -> tuple[str, ...]:
    """The modes whose prompts fit the media: one, where the keyframes stand as the format has them."""
    if media.task == REF2VA:
        return (REF2VA,)
    keyframes = _keyframes(media)
    for mode in (FIRST, FIRST_LAST, LAST):
        if keyframes == keyframe_places(mode, media.request.num_frames):
            return (mode,)
    return (FIRST, LAST) if len(keyframes) == 1 else (FIRST_LAST,)


def soundtracks(media: EncodedMedia) -> tuple[int, ...]:
    """Which ``<Audio N>`` came along with a video."""
    sounds = [medium.condition for medium in media.presented if medium.condition.audio is not None]
    return tuple(number for number, sound in enumerate(sounds, start=1) if sound.kind == "video")


def keyframe_places(mode: str, num_frames: int) -> tuple[int, ...]:
    """The frames at which the format has keyframes."""
    return {FIRST: (0,), FIRST_LAST: (0, num_frames - 1), LAST: (num_frames - 1,)}.get(mode, ())


def _keyframes(media: EncodedMedia) -> tuple[int, ...]:
    return tuple(medium.condition.frame or 0 for medium in media.presented)


def detect_mode(prompt: str) -> str:
    """The mode that a prompt was most likely written for."""
    parsed = parse(prompt)
    if any(section.exact and section.name not in BASE_SECTIONS for section in parsed.sections):
        return REF2VA
    opening = parsed.opening.lstrip()[:400]
    if opening.startswith(ALIGNMENT.split(" \u2014")[0]):
        return FIRST_LAST if "Picture 2" in opening else LAST
    return FIRST if opening.startswith(FIRST_FRAME_LINE[:30]) else T2VA
