"""Sections, the first line and code fences: the frame of a prompt."""

from __future__ import annotations

import re
from collections.abc import Iterator

from comfyui_h3.h3core.prompt.context import PromptContext
from comfyui_h3.h3core.prompt.findings import Finding, error, excerpt, warning
from comfyui_h3.h3core.prompt.grammar import (
    ALIGNMENT,
    BASE_MAIN,
    FIRST_FRAME_LINE,
    FIRST_LINE_PATTERNS,
    REF2VA,
    REFERENCE_MAIN,
    T2VA,
    first_line,
    main_section_of,
    sections_of,
)
from comfyui_h3.h3core.prompt.parse import ParsedPrompt, Section

MAIN_SECTIONS = (BASE_MAIN, REFERENCE_MAIN)
FIRST_LINE_STARTS = (FIRST_FRAME_LINE[:22], ALIGNMENT[:30])


def sections(parsed: ParsedPrompt, context: PromptContext) -> Iterator[Finding]:
    """Every section of the mode once, in order, spelled right and not empty; none of the other mode's."""
    wanted = sections_of(context.mode)
    mine = [section for section in parsed.sections if section.name in wanted]
    foreign = [section for section in parsed.sections if section.name not in wanted]
    if not mine and not any(section.name in MAIN_SECTIONS for section in foreign):
        yield error(
            "sections-missing",
            f"there are no sections; H3 was trained on {_names(wanted)} (H3 Prompt Builder writes them). "
            "Plain prose runs as well, outside of what it was trained on",
            1,
        )
        return
    for name in wanted:
        if parsed.section(name) is None:
            yield error("section-missing", f"the section {name}: is missing; begin a line with it", 1)
    yield from _heads(parsed, mine)
    yield from _order(parsed, mine, wanted)
    for section in foreign:
        line = parsed.line_of(section.start)
        if section.name in MAIN_SECTIONS:
            yield error(
                "other-mode",
                f"{section.name}: belongs to another mode; mode={context.mode} has {main_section_of(context.mode)}:",
                line,
            )
        elif section.exact:
            yield error("other-mode", f"{section.name}: is no section of mode={context.mode}; remove it", line)


def _heads(parsed: ParsedPrompt, found: list[Section]) -> Iterator[Finding]:
    seen = set()
    for section in found:
        line = parsed.line_of(section.start)
        if section.name in seen:
            yield error("section-repeated", f"{section.name}: stands here for a second time; join the two", line)
        seen.add(section.name)
        if not section.exact:
            yield error(
                "section-head",
                f"{excerpt(section.head)} is not {section.name}: at the start of a line; write it exactly so",
                line,
            )
        if not parsed.body(section).strip():
            yield error("section-empty", f"{section.name}: is empty; describe it, or N/A for no sound or music", line)


def _order(parsed: ParsedPrompt, found: list[Section], wanted: tuple[str, ...]) -> Iterator[Finding]:
    places = [wanted.index(section.name) for section in found]
    for before, after, section in zip(places, places[1:], found[1:], strict=False):
        if after < before:
            yield error(
                "section-order",
                f"{section.name}: stands behind {wanted[before]}:; the order is {_names(wanted)}",
                parsed.line_of(section.start),
            )


def opening(parsed: ParsedPrompt, context: PromptContext) -> Iterator[Finding]:
    """What stands above the sections: nothing, or exactly the mode's first line and one blank line."""
    text = parsed.opening.replace("\r\n", "\n").replace("\r", "\n")
    if context.mode not in (T2VA, REF2VA) and not context.has_first_line:
        yield _unknown(context)
    elif not parsed.sections:
        if context.has_first_line and not text.startswith(FIRST_LINE_STARTS):
            yield _absent(parsed, context)
    elif context.mode in (T2VA, REF2VA):
        if text.strip():
            yield error(
                "text-before-sections",
                f"{excerpt(text.strip())} stands above the sections; with mode={context.mode} the prompt begins with "
                f"{sections_of(context.mode)[0]}:",
                1,
            )
    elif not text.strip():
        yield _absent(parsed, context)
    else:
        line, _, rest = text.partition("\n")
        yield from _first_line(line, parsed, context)
        yield from _behind_first_line(rest)


def _unknown(context: PromptContext) -> Finding:
    places = "" if context.keyframes is None else f" (frame {', '.join(map(str, context.keyframes))})"
    return warning(
        "first-line-unknown",
        f"the format knows a first line for first and last frame, and none for {context.these_keyframes}{places}; "
        "say in words where each stands",
    )


def _absent(parsed: ParsedPrompt, context: PromptContext) -> Finding:
    wanted = _wanted_first_line(parsed, context)
    return warning("first-line-absent", f"the first line of mode={context.mode} is missing; it is: {wanted}", 1)


def _first_line(line: str, parsed: ParsedPrompt, context: PromptContext) -> Iterator[Finding]:
    stated = FIRST_LINE_PATTERNS[context.mode].fullmatch(line)
    if stated is not None:
        yield from _stated(stated.groupdict(), parsed, context)
    else:
        yield error(
            "first-line",
            f"the first line is not the one of mode={context.mode}{_difference(line, context)}; "
            f"it must be: {_wanted_first_line(parsed, context)}",
            1,
        )


def _behind_first_line(rest: str) -> Iterator[Finding]:
    """rest: from the first line's own line end to the sections."""
    if not rest.startswith("\n"):
        yield error("first-line-blank", "no blank line follows the first line; put one there", 1)
    elif rest.strip():
        yield error(
            "text-before-sections",
            f"{excerpt(rest.strip())} stands between the first line and the sections; move it",
            1,
        )
    elif len(rest) > 1:
        yield warning("first-line-blank", "more than one blank line follows the first line; leave one", 1)


def _stated(stated: dict[str, str], parsed: ParsedPrompt, context: PromptContext) -> Iterator[Finding]:
    last = last_shot(parsed)
    if "shot" in stated and parsed.shots and stated["shot"] != str(last):
        yield error("first-line-shot", f"the first line names Shot {stated['shot']}, the last shot is Shot {last}", 1)
    if "seconds" in stated and not context.accepts_seconds(stated["seconds"]):
        yield error(
            "first-line-duration",
            f"the first line says {stated['seconds']} seconds, the video has {context.num_frames} frames; "
            f"write {context.seconds}",
            1,
        )


def _difference(line: str, context: PromptContext) -> str:
    """What is hard to see, for the message."""
    pattern = FIRST_LINE_PATTERNS[context.mode]
    if pattern.fullmatch(line.strip()):
        return " (there are spaces around it)"
    if pattern.fullmatch(re.sub(r" (?:-|--|–|―) ", " — ", line, count=1)):
        return " (its dash is the long one, U+2014)"
    return ""


def _wanted_first_line(parsed: ParsedPrompt, context: PromptContext) -> str:
    return first_line(context.mode, last_shot(parsed), context.seconds)


def last_shot(parsed: ParsedPrompt) -> int:
    """The number of the final shot; 1 where no shot can be made out."""
    numbers = [shot.number for shot in parsed.shots if shot.number]
    return numbers[-1] if numbers else 1


def code_fences(parsed: ParsedPrompt, context: PromptContext) -> Iterator[Finding]:
    """Fences come along when a prompt is copied out of a chat."""
    for fence in ("```", "~~~"):
        place = parsed.text.find(fence)
        if place >= 0:
            yield error("code-fence", f"{fence} is read as text; remove the code fences", parsed.line_of(place))


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"{name}:" for name in names)
