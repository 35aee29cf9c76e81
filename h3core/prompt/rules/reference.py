"""The sections that only prompts with references have: summary and retention_analysis."""

from __future__ import annotations

import re
from collections.abc import Iterator

from comfyui_h3.h3core.prompt.context import PromptContext
from comfyui_h3.h3core.prompt.findings import Finding, error, excerpt, warning
from comfyui_h3.h3core.prompt.grammar import (
    AUDIO,
    AUDIO_REFERENCE,
    AUDIO_REUSE,
    EDIT_SENTENCE,
    REF2VA,
    RETENTION,
    SUBJECT,
    SUMMARY,
    TASK_TYPES,
    VIDEO,
    VIDEO_CONTINUATION,
    VIDEO_EDITING,
    markers_of,
)
from comfyui_h3.h3core.prompt.parse import ParsedPrompt
from comfyui_h3.h3core.prompt.rules.labels import definitions, lines_of

_PREFIX = re.compile(r"\[([^\[\]\r\n]{1,200})\][ \t]*")
_EDITED = re.compile(r"The target video is an edited version of <Video [1-9]\d{0,5}>[.,]")
_RETENTION = re.compile(
    r"<(?P<kind>Subject|Picture|Video|Audio) (?P<number>[1-9]\d{0,5})>(?: \((?P<where>[^()]{1,400})\))?: "
    r"(?P<marker>[A-Za-z_]{1,40}) - (?P<note>\S.*)"
)
_RETENTION_LABEL = re.compile(r"[ \t*-]{0,6}<(Subject|Picture|Video|Audio) ([1-9]\d{0,5})>")
_SHOT_NUMBER = re.compile(r"\[Shot ([1-9]\d{0,3})\]")
NEEDS = {VIDEO_EDITING: VIDEO, VIDEO_CONTINUATION: VIDEO, AUDIO_REUSE: AUDIO, AUDIO_REFERENCE: AUDIO}


def summary(parsed: ParsedPrompt, context: PromptContext) -> Iterator[Finding]:
    """``[type + type]`` of the known types, each once, with the media that they are about."""
    section = parsed.section(SUMMARY)
    if context.mode != REF2VA or section is None or not parsed.body(section).strip():
        return
    text = parsed.body(section)
    line = parsed.line_of(section.body + len(text) - len(text.lstrip()))
    prefix = _PREFIX.match(text.lstrip())
    if prefix is None:
        yield error(
            "summary-prefix", f"{SUMMARY}: does not begin with [type] or [type + type] of {', '.join(TASK_TYPES)}", line
        )
        return
    types = prefix[1].split(" + ")
    for name in dict.fromkeys(types):
        if name not in TASK_TYPES:
            yield error(
                "summary-type",
                f"{excerpt(name)} is no task type; join with ' + ' those of {', '.join(TASK_TYPES)}",
                line,
            )
        if types.count(name) > 1:
            yield error("summary-repeated", f"{excerpt(name)} stands more than once in {SUMMARY}:; keep one", line)
        kind = NEEDS.get(name)
        if kind and context.attached(kind) == 0:
            yield error(
                "summary-media", f"{name} needs <{kind} 1>, and none is connected; connect it or drop the type", line
            )
    rest = text.lstrip()[prefix.end() :].lstrip()
    if VIDEO_EDITING in types and not _EDITED.match(rest):
        yield error("summary-edit", f"behind the types of an edit stands: {EDIT_SENTENCE}. (or a comma)", line)
    if not rest:
        yield warning("summary-short", f"{SUMMARY}: has types and no sentence; say what the video shows", line)


def retention(parsed: ParsedPrompt, context: PromptContext) -> Iterator[Finding]:
    """One line for each defined label: ``<Subject 1> (appears in [Shot 1]): fully_preserved - note``."""
    if context.mode != REF2VA or parsed.section(RETENTION) is None:
        return
    defined = definitions(parsed)
    shots = {shot.number for shot in parsed.shots}
    seen: set[tuple[str, int]] = set()
    for start, text in lines_of(parsed, RETENTION):
        line = parsed.line_of(start)
        entry = _RETENTION.fullmatch(text.rstrip())
        if entry is None:
            yield error(
                "retention-line",
                f"{excerpt(text.strip())} is not of the form "
                "<Subject 1> (appears in [Shot 1]): fully_preserved - what is kept",
                line,
            )
            loose = _RETENTION_LABEL.match(text)
            if loose:
                seen.add((loose[1], int(loose[2])))
            continue
        label = (entry["kind"], int(entry["number"]))
        if label in seen:
            yield error("retention-twice", f"{_written(label)} has a second line; keep one for each label", line)
        seen.add(label)
        if label not in defined and label[0] != SUBJECT:
            yield warning(
                "retention-undefined", f"{_written(label)} has a line here and none that defines it; add one", line
            )
        yield from _retained(entry, shots, line)
    for label in defined:
        if label not in seen:
            yield error("retention-missing", f"{_written(label)} is defined and has no line in {RETENTION}:; add it")


def _retained(entry: re.Match[str], shots: set[int | None], line: int) -> Iterator[Finding]:
    """The marker of one line, and where it says that its label is seen. shots: the numbers that the video has."""
    kind, where = entry["kind"], entry["where"]
    name = f"<{kind} {entry['number']}>"
    if entry["marker"] not in markers_of(kind):
        yield error(
            "retention-marker", f"{entry['marker']} does not fit {name}; use one of {', '.join(markers_of(kind))}", line
        )
    if kind == SUBJECT and not where:
        yield warning("retention-shots", f"{name} does not say where; write (appears in [Shot 1])", line)
    unknown = [number for number in map(int, _SHOT_NUMBER.findall(where or "")) if number not in shots]
    if unknown and shots:
        yield warning("retention-shots", f"{name} names Shot {unknown[0]}, which the video does not have", line)


def _written(label: tuple[str, int]) -> str:
    return f"<{label[0]} {label[1]}>"


def speakers(parsed: ParsedPrompt, context: PromptContext) -> Iterator[Finding]:
    """Speakers have no place in retention_analysis."""
    section = parsed.section(RETENTION)
    if context.mode != REF2VA or section is None:
        return
    for speaker in parsed.speakers:
        if section.body <= speaker.start < section.end:
            yield warning(
                "retention-speaker",
                f"{excerpt(speaker.written)} does not belong here; remove it",
                parsed.line_of(speaker.start),
            )
