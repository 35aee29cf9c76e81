"""Shot markers and their times."""

from __future__ import annotations

from collections.abc import Iterator

from comfyui_h3.h3core.prompt.context import PromptContext
from comfyui_h3.h3core.prompt.findings import Finding, error, excerpt, warning
from comfyui_h3.h3core.prompt.grammar import BASE_MAIN, REF2VA, REFERENCE_MAIN, main_section_of, shot_time
from comfyui_h3.h3core.prompt.parse import ParsedPrompt


def numbering(parsed: ParsedPrompt, context: PromptContext) -> Iterator[Finding]:
    """``[Shot 1]`` to ``[Shot n]``, each spelled exactly so and with something in it."""
    if parsed.section(BASE_MAIN) is None and parsed.section(REFERENCE_MAIN) is None:
        return  # prose: the missing sections are reported, and there is no place for shots
    name = main_section_of(context.mode)
    start, end = parsed.main_span(name)
    if not parsed.shots:
        if parsed.text[start:end].strip():
            yield error(
                "shot-missing", f"{name}: has no [Shot 1]; put it where the first shot begins", _line(parsed, start)
            )
        return
    for wanted, shot in enumerate(parsed.shots, start=1):
        line = parsed.line_of(shot.start)
        if not shot.exact:
            yield error("shot-marker", f"{excerpt(shot.marker)} is not a shot marker; write [Shot {wanted}]", line)
        elif shot.number != wanted:
            yield error(
                "shot-number",
                f"{shot.marker} is shot number {wanted}; write [Shot {wanted}], and an earlier shot without brackets",
                line,
            )
        if not parsed.text[shot.body : shot.end].strip(" \t\r\n,.;:"):
            yield warning("shot-empty", f"{excerpt(shot.marker)} has no text; describe it or remove it", line)
    for place in parsed.mentions:
        yield warning(
            "shot-mention",
            "[Shot N] in brackets begins a shot; to speak of an earlier one write Shot N without them",
            parsed.line_of(place),
        )
    yield from _before_first(parsed, context, start)


def _before_first(parsed: ParsedPrompt, context: PromptContext, start: int) -> Iterator[Finding]:
    before = parsed.text[start : parsed.shots[0].start].strip()
    if before and context.mode != REF2VA:
        yield warning(
            "text-before-shot",
            f"{excerpt(before)} stands before [Shot 1]; the style belongs behind the marker",
            _line(parsed, start),
        )
    if not before and context.mode == REF2VA:
        yield warning(
            "style-missing",
            f"{REFERENCE_MAIN}: begins with [Shot 1]; put one or two sentences on the style above it",
            _line(parsed, start),
        )


def times(parsed: ParsedPrompt, context: PromptContext) -> Iterator[Finding]:
    """No time on the first shot, `` At MM:SS.mmm`` on every other, increasing, before the end of the video."""
    if parsed.section(BASE_MAIN) is None and parsed.section(REFERENCE_MAIN) is None:
        return
    previous = 0
    for index, shot in enumerate(parsed.shots):
        line = parsed.line_of(shot.start)
        marker = excerpt(shot.marker)
        if index == 0:
            if shot.time is not None:
                yield error("shot-time-first", f"{marker} has a time; the first shot begins at 0, remove it", line)
            continue
        if shot.time is None:
            yield error("shot-time-missing", f"{marker} has no time; write [Shot {index + 1}] At 00:03.200, …", line)
        elif shot.time_ms is None:
            yield error(
                "shot-time-form",
                f"{excerpt(shot.time.strip())} is not a time of the form At MM:SS.mmm, for example At 00:03.200",
                line,
            )
        else:
            if shot.time_ms <= previous:
                yield error(
                    "shot-time-order",
                    f"{marker} begins at {shot_time(shot.time_ms)}, not after {shot_time(previous)}; "
                    "times must increase",
                    line,
                )
            if shot.time_ms >= context.duration_s * 1000:
                yield error(
                    "shot-time-late",
                    f"{marker} begins at {shot_time(shot.time_ms)}, and the video ends at {context.seconds} s "
                    f"({context.num_frames} frames); move it forward or make the video longer",
                    line,
                )
            previous = max(previous, shot.time_ms)
            if not parsed.text.startswith(", ", shot.body):
                yield warning(
                    "shot-time-comma", f"no comma and space follow {excerpt(shot.time.strip())}; add them", line
                )


def _line(parsed: ParsedPrompt, place: int) -> int:
    """The line of the first letter at or after ``place``."""
    rest = parsed.text[place:]
    return parsed.line_of(place + len(rest) - len(rest.lstrip()))
