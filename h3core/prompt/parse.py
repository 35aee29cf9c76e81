"""A prompt taken apart: sections, shots, spoken lines, labels and speakers, each with its place.

Tolerant: whatever the text is, it gives the parts that can be made out, and says of each whether it is written exactly
as the format wants it. Every pattern has bounded repetitions, so that the time grows with the length alone.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field

from comfyui_h3.h3core.prompt.grammar import BASE_MAIN, BASE_SECTIONS, LABEL_KINDS, REFERENCE_MAIN, REFERENCE_SECTIONS

_NAMES = tuple(dict.fromkeys(BASE_SECTIONS + REFERENCE_SECTIONS))
_LOOSE_NAMES = "|".join(name.replace("_", "[ _-]?") for name in _NAMES)
_UNMISTAKABLE = "|".join(name for name in _NAMES if "_" in name)  # "summary:" in mid-line is only a word
_HEAD = re.compile(
    rf"(?:(?<=[\r\n])|\A)(?P<before>[ \t#*>`-]{{0,12}})(?P<loose>{_LOOSE_NAMES})[ \t*`]{{0,4}}[:：][*]{{0,2}}"
    rf"|(?P<inline>{_UNMISTAKABLE})[ \t]{{0,4}}[:：]",
    re.IGNORECASE,
)
_SHOT = re.compile(r"[\[［【]\s{0,3}shot(?![a-z])(?:[^\[\]［］【】\r\n]{0,24}[\]］】])?", re.IGNORECASE)
_EXACT_SHOT = re.compile(r"\[Shot ([1-9]\d{0,3})\]")
_EXACT_TIME = re.compile(r" At (\d\d):([0-5]\d)\.(\d{3})(?!\d)")
_TIMELIKE = re.compile(
    r"\s{0,3}(?:at\s{1,3})?(\d{1,6}[:.：]\d[\d:.：]{0,12}|\d{1,6}\s?s(?:ec(?:onds?)?)?\b)", re.IGNORECASE
)
_CLOCKLIKE = re.compile(r"\s{0,3}(?:at\s{1,3})?\d{1,2}[:：]\d{2}[.,:]\d{1,3}", re.IGNORECASE)
_SPOKEN = re.compile(r"</?d>")
_LANGUAGE = re.compile(r"\[([^\[\]\r\n]{1,40})\]")
_LABEL = re.compile(
    r"<(?P<space>[ \t]{0,2})(?P<kind>[A-Za-z]{1,20})(?P<gap>[ \t_#-]{0,3})(?P<number>\d{1,6})[ \t]{0,2}>?"
)
_EXACT_LABEL = re.compile(rf"<(?:{'|'.join(LABEL_KINDS)}) [1-9]\d{{0,5}}>")
_BARE_PICTURE = re.compile(r"(?<![<\w])Picture ([1-9]\d{0,3})(?![\w>])")
_SPEAKER = re.compile(r"\(S[1-9]\d{0,2}(?:,S[1-9]\d{0,2}){0,20}\)")
_SPEAKERLIKE = re.compile(
    r"[(\[][ \t]{0,2}s[ \t]?\d{1,3}(?:[ \t]{0,2}[,&+/][ \t]{0,2}s?[ \t]?\d{1,3}){0,20}[ \t]{0,2}[)\]]", re.IGNORECASE
)
_SENTENCE_END = frozenset('.!?…"”>。！？:;')


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """``name:`` and its text up to the next section. exact: the head is at line start and spelled as it must be."""

    name: str
    head: str
    start: int
    body: int
    end: int
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """One ``[Shot N]`` and what follows it. time: as written, None without one; time_ms: None when it is not exact.

    body: where the text behind marker and time begins; end: where the next shot or the section's end is.
    """

    number: int | None
    marker: str
    exact: bool
    time: str | None
    time_ms: int | None
    start: int
    body: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """One ``<d>[Language] words</d>``. closed: False when ``</d>`` is missing, or another ``<d>`` comes first.

    body: behind ``<d>``; words: behind the language tag; close: where ``</d>`` or, failing that, its search ended.
    """

    language: str | None
    start: int
    body: int
    words: int
    close: int
    closed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """``<kind number>`` as written. exact: a known kind, one space, no leading zero, closed."""

    kind: str
    number: int
    written: str
    exact: bool
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaker:
    """``(S1)`` or ``(S1,S2)`` as written, with its numbers."""

    numbers: tuple[int, ...]
    written: str
    exact: bool
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedPrompt:
    """Parts in the order of the text; offsets into ``text``.

    mentions: ``[Shot N]`` inside a sentence that speaks of an earlier shot. stray: places of ``</d>`` without ``<d>``.
    """

    text: str
    sections: tuple[Section, ...]
    shots: tuple[Shot, ...]
    mentions: tuple[int, ...]
    dialogues: tuple[Dialogue, ...]
    stray: tuple[int, ...]
    labels: tuple[Label, ...]
    bare_pictures: tuple[tuple[int, int], ...]  # (number, place)
    speakers: tuple[Speaker, ...]
    _line_starts: tuple[int, ...] = field(repr=False)

    def line_of(self, place: int) -> int:
        return bisect_right(self._line_starts, place)

    def section(self, name: str) -> Section | None:
        """The first section of that name."""
        return next((section for section in self.sections if section.name == name), None)

    def body(self, section: Section) -> str:
        return self.text[section.body : section.end]

    @property
    def opening(self) -> str:
        """What stands before the first section; all of a text without sections."""
        return self.text[: self.sections[0].start] if self.sections else self.text

    def main_span(self, name: str) -> tuple[int, int]:
        """Where the shots are: in the section of that name, else the other mode's, else anywhere."""
        other = REFERENCE_MAIN if name == BASE_MAIN else BASE_MAIN
        section = self.section(name) or self.section(other)
        return (section.body, section.end) if section else (0, len(self.text))


def parse(prompt: str) -> ParsedPrompt:
    """The parts of ``prompt``. Never fails."""
    sections = _sections(prompt)
    main = [s for s in sections if s.name in (BASE_MAIN, REFERENCE_MAIN)]
    start, end = (main[0].body, main[0].end) if main else (0, len(prompt))
    shots, mentions = _shots(prompt, start, end)
    dialogues, stray = _dialogues(prompt)
    return ParsedPrompt(
        text=prompt,
        sections=sections,
        shots=shots,
        mentions=mentions,
        dialogues=dialogues,
        stray=stray,
        labels=tuple(_label(found) for found in _LABEL.finditer(prompt) if _is_label(found)),
        bare_pictures=tuple((int(found[1]), found.start()) for found in _BARE_PICTURE.finditer(prompt)),
        speakers=tuple(_speaker(found) for found in _SPEAKERLIKE.finditer(prompt)),
        _line_starts=(0, *(found.end() for found in re.finditer(r"\r\n|\r|\n", prompt))),
    )


def _sections(text: str) -> tuple[Section, ...]:
    heads: list[tuple[re.Match[str], str]] = []
    for found in _HEAD.finditer(text):
        written = (found["loose"] or found["inline"]).lower()
        heads.append((found, next(n for n in _NAMES if n.replace("_", "") == re.sub("[ _-]", "", written))))
    sections = []
    for index, (found, name) in enumerate(heads):
        start = found.start() if found["loose"] is None else found.start("loose")
        at_line_start = start == 0 or text[start - 1] in "\r\n"
        sections.append(
            Section(
                name=name,
                head=found[0].strip(),
                start=found.start(),
                body=found.end(),
                end=heads[index + 1][0].start() if index + 1 < len(heads) else len(text),
                exact=at_line_start and text[start : found.end()] == f"{name}:",
            )
        )
    return tuple(sections)


def _shots(text: str, start: int, end: int) -> tuple[tuple[Shot, ...], tuple[int, ...]]:
    markers: list[tuple[re.Match[str], int | None, re.Match[str] | None]] = []
    mentions: list[int] = []
    for found in _SHOT.finditer(text, start, end):
        digits = re.search(r"\d{1,6}", found[0])
        number = int(digits[0]) if digits else None
        timelike = _CLOCKLIKE if number == 1 and not markers else _TIMELIKE
        time = timelike.match(text, found.end(), end)
        before = text[max(start, found.start() - 40) : found.start()].rstrip(" \t")
        in_sentence = bool(before) and before[-1] not in _SENTENCE_END and before[-1] not in "\r\n"
        if time is None and in_sentence and number is not None and 0 < number <= len(markers):
            mentions.append(found.start())
        else:
            markers.append((found, number, time))
    shots = []
    for index, (found, number, time) in enumerate(markers):
        exact = _EXACT_TIME.match(text, found.end(), end)
        written = exact or time
        shots.append(
            Shot(
                number=number,
                marker=found[0],
                exact=_EXACT_SHOT.fullmatch(found[0]) is not None,
                time=written[0] if written else None,
                time_ms=int(exact[1]) * 60_000 + int(exact[2]) * 1000 + int(exact[3]) if exact else None,
                start=found.start(),
                body=(written or found).end(),
                end=markers[index + 1][0].start() if index + 1 < len(markers) else end,
            )
        )
    return tuple(shots), tuple(mentions)


def _dialogues(text: str) -> tuple[tuple[Dialogue, ...], tuple[int, ...]]:
    dialogues: list[Dialogue] = []
    stray: list[int] = []
    opened: int | None = None
    for found in _SPOKEN.finditer(text):
        if found[0] == "<d>":
            if opened is not None:
                dialogues.append(_dialogue(text, opened, found.start(), closed=False))
            opened = found.start()
        elif opened is None:
            stray.append(found.start())
        else:
            dialogues.append(_dialogue(text, opened, found.start(), closed=True))
            opened = None
    if opened is not None:
        dialogues.append(_dialogue(text, opened, len(text), closed=False))
    return tuple(dialogues), tuple(stray)


def _dialogue(text: str, start: int, close: int, *, closed: bool) -> Dialogue:
    body = start + len("<d>")
    language = _LANGUAGE.match(text, body, close)
    return Dialogue(
        language=language[1] if language else None,
        start=start,
        body=body,
        words=language.end() if language else body,
        close=close,
        closed=closed,
    )


def _is_label(found: re.Match[str]) -> bool:
    """Any ``<word 3>``; without its end only words that mean a label."""
    known = (*map(str.lower, LABEL_KINDS), "image", "img", "pic", "clip", "sound")
    return found[0].endswith(">") or found["kind"].lower() in known


def _label(found: re.Match[str]) -> Label:
    return Label(
        kind=found["kind"],
        number=int(found["number"]),
        written=found[0],
        exact=_EXACT_LABEL.fullmatch(found[0]) is not None,
        start=found.start(),
        end=found.end(),
    )


def _speaker(found: re.Match[str]) -> Speaker:
    return Speaker(
        numbers=tuple(int(number) for number in re.findall(r"\d+", found[0])),
        written=found[0],
        exact=_SPEAKER.fullmatch(found[0]) is not None,
        start=found.start(),
    )
