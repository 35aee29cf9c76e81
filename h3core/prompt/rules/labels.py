"""Labels: their kinds and form, subjects and their definitions, media that are there and media that are cited."""

from __future__ import annotations

import re
from collections.abc import Iterator

from comfyui_h3.h3core.prompt.context import PromptContext
from comfyui_h3.h3core.prompt.findings import Finding, error, excerpt, warning
from comfyui_h3.h3core.prompt.grammar import (
    AUDIO,
    DEFINITIONS,
    FIRST_LAST,
    LABEL_KINDS,
    MEDIA_KINDS,
    PICTURE,
    REF2VA,
    SUBJECT,
    VIDEO,
)
from comfyui_h3.h3core.prompt.parse import ParsedPrompt

_DEFINITION = re.compile(r"[ \t]*<(Subject|Picture|Video|Audio) ([1-9]\d{0,5})>(?P<verb>[ \t]+(?:is|are)\b)?")
_TAG = re.compile(r"</?[A-Za-z][^<>\r\n]{0,40}>")
_KNOWN_TAGS = frozenset({"<d>", "</d>", "<scenetrans>", "<cutoff>"})


def form(parsed: ParsedPrompt, context: PromptContext) -> Iterator[Finding]:
    """``<Subject N>``, ``<Picture N>``, ``<Video N>``, ``<Audio N>`` and no other kind, closed, with one space."""
    for label in parsed.labels:
        if label.exact:
            continue
        line, written = parsed.line_of(label.start), excerpt(label.written)
        if label.kind not in LABEL_KINDS:
            yield error(
                "label-kind",
                f"{written} is no label; there are <Subject N>, <Picture N>, <Video N> and <Audio N>, spelled so",
                line,
            )
        elif not label.written.endswith(">"):
            yield error("label-open", f"{written} is not closed; write <{label.kind} {label.number}>", line)
        else:
            yield error("label-form", f"{written} is not <{label.kind} {label.number}>; write it exactly so", line)
    at_labels = {label.start for label in parsed.labels}
    for found in _TAG.finditer(parsed.text):
        if found[0] in _KNOWN_TAGS or found.start() in at_labels or re.fullmatch(r"</?\s*d\s*/?>", found[0], re.I):
            continue
        if re.match(rf"<(?:{'|'.join(LABEL_KINDS)})\b", found[0]):
            yield error(
                "label-form",
                f"{excerpt(found[0])} has no number; write for example <Subject 1>",
                parsed.line_of(found.start()),
            )
        else:
            yield warning(
                "unknown-tag",
                f"{excerpt(found[0])} means nothing to H3; remove it or say it in words",
                parsed.line_of(found.start()),
            )


def subjects(parsed: ParsedPrompt, context: PromptContext) -> Iterator[Finding]:
    """Every ``<Subject N>`` is defined, in a line of its own, before it is used."""
    defined = definitions(parsed)
    reported = set()
    for label in parsed.labels:
        if label.kind != SUBJECT or not label.exact or label.number in reported:
            continue
        line = parsed.line_of(label.start)
        place = defined.get((SUBJECT, label.number))
        if context.mode != REF2VA:
            reported.add(label.number)
            yield error(
                "subject-mode",
                f"{label.written} belongs to references; in mode={context.mode} describe it in words",
                line,
            )
        elif place is None:
            reported.add(label.number)
            yield error(
                "subject-undefined",
                f"{label.written} is not defined; add the line {label.written} is … to {DEFINITIONS}:",
                line,
            )
        elif label.start < place:
            reported.add(label.number)
            yield error("subject-late", f"{label.written} is used before the line that defines it; move that up", line)
    if context.mode == REF2VA:
        yield from _definition_lines(parsed)


def definitions(parsed: ParsedPrompt) -> dict[tuple[str, int], int]:
    """(kind, number) of what subject_definitions defines, and where."""
    found: dict[tuple[str, int], int] = {}
    for start, line in lines_of(parsed, DEFINITIONS):
        label = _DEFINITION.match(line)
        if label:
            found.setdefault((label[1], int(label[2])), start + line.index("<"))
    return found


def _definition_lines(parsed: ParsedPrompt) -> Iterator[Finding]:
    seen: set[tuple[str, int]] = set()
    numbers = []
    for start, line in lines_of(parsed, DEFINITIONS):
        number = parsed.line_of(start)
        label = _DEFINITION.match(line)
        if label is None:
            yield warning(
                "definition-line", f"{excerpt(line.strip())} defines no label; a line reads <Subject 1> is …", number
            )
            continue
        key = (label[1], int(label[2]))
        if key in seen:
            yield warning("definition-twice", f"<{key[0]} {key[1]}> is defined a second time; join the two", number)
        elif key[0] == SUBJECT:
            numbers.append(key[1])
        seen.add(key)
        if label["verb"] is None:
            yield warning("definition-line", f"<{key[0]} {key[1]}> is not followed by is; write <… N> is …", number)
    if numbers != list(range(1, len(numbers) + 1)):
        listed = ", ".join(map(str, numbers[:20]))
        yield warning("subject-order", f"the subjects are numbered {listed}; count 1, 2, 3 in the order of the lines")


def lines_of(parsed: ParsedPrompt, name: str) -> Iterator[tuple[int, str]]:
    """(place, text) of every line of a section that is not blank."""
    section = parsed.section(name)
    if section is None:
        return
    for found in re.finditer(r"[^\r\n]+", parsed.body(section)):
        if found[0].strip():
            yield section.body + found.start(), found[0]


def attached(parsed: ParsedPrompt, context: PromptContext) -> Iterator[Finding]:
    """No label counts further than the media of its kind."""
    cited = [(label.kind, label.number, label.written, label.start) for label in parsed.labels if label.exact]
    if context.mode == FIRST_LAST:
        cited += [(PICTURE, number, f"Picture {number}", place) for number, place in parsed.bare_pictures]
    reported = set()
    for kind, number, written, place in cited:
        count = context.attached(kind) if kind in MEDIA_KINDS else None
        if count is None or number <= count or (kind, number) in reported:
            continue
        reported.add((kind, number))
        there = f"only {count} of that kind {_is(count)}" if count else "nothing of that kind is"
        yield error(
            "label-without-media",
            f"{written} is named, and {there} connected; connect it or remove the label",
            parsed.line_of(place),
        )


def cited(parsed: ParsedPrompt, context: PromptContext) -> Iterator[Finding]:
    """Connected media that the text never names have an effect that nobody asked for."""
    for kind in MEDIA_KINDS:
        count = context.attached(kind)
        if not count:
            continue
        named = {label.number for label in parsed.labels if label.kind == kind and label.exact}
        if context.mode == FIRST_LAST and kind == PICTURE:
            named |= {number for number, _ in parsed.bare_pictures}
        missing = [number for number in range(1, count + 1) if number not in named]
        missing = _without_soundtracks(missing, context) if kind == AUDIO else missing
        if not missing:
            continue
        label = "Picture {}" if context.mode == FIRST_LAST else f"<{kind} {{}}>"
        names = ", ".join(label.format(number) for number in missing[:10])
        it = "it is" if len(missing) == 1 else "they are"
        if named:
            yield warning("media-uncited", f"{names} {_is(len(missing))} connected and never named; say what {it} for")
        else:
            yield error(
                "media-uncited",
                f"{names} {_is(len(missing))} connected and no {kind} is named; say what {it} for, or disconnect "
                f"{'it' if len(missing) == 1 else 'them'}",
            )
    if context.mode == FIRST_LAST:
        yield from _brackets(parsed)


def _is(number: int) -> str:
    return "is" if number == 1 else "are"


def _without_soundtracks(missing: list[int], context: PromptContext) -> list[int]:
    """Sound that only comes along with a video need not be named."""
    if context.soundtracks is not None:
        return [number for number in missing if number not in context.soundtracks]
    possible = context.attached(VIDEO) or 0  # each video has one soundtrack or none
    return missing if len(missing) > possible else []


def _brackets(parsed: ParsedPrompt) -> Iterator[Finding]:
    for label in parsed.labels:
        if label.kind == PICTURE and label.exact:
            yield warning(
                "picture-brackets",
                f"with first and last frame the format names Picture {label.number} without angle brackets",
                parsed.line_of(label.start),
            )
            return
