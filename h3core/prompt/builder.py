"""Fields -> prompt text. What the user wrote is put in as it is, or refused; never rewritten."""

from __future__ import annotations

from dataclasses import dataclass

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.prompt.context import PromptContext
from comfyui_h3.h3core.prompt.findings import excerpt
from comfyui_h3.h3core.prompt.grammar import (
    BASE_MAIN,
    DEFINITIONS,
    MUSIC,
    NONE,
    REF2VA,
    REFERENCE_MAIN,
    RETENTION,
    SOUNDSCAPE,
    SUMMARY,
    T2VA,
    TASK_TYPES,
    first_line,
    shot_time,
)
from comfyui_h3.h3core.prompt.parse import parse


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """text: what is seen and heard. start_ms: when the cut to it comes; None for the first shot."""

    text: str
    start_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BasePrompt:
    """A prompt from text alone or with keyframes. Shot texts behind the first begin with their cut."""

    shots: tuple[Shot, ...]
    overall_soundscape: str
    non_diegetic_music: str = NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencePrompt:
    """A prompt with references. definitions and retention: one line for each label. style: one or two sentences."""

    definitions: tuple[str, ...]
    task_types: tuple[str, ...]
    summary: str
    retention: tuple[str, ...]
    style: str
    shots: tuple[Shot, ...]
    overall_soundscape: str
    non_diegetic_music: str = NONE


def build(fields: BasePrompt | ReferencePrompt, context: PromptContext) -> str:
    """The prompt text. Raises RequestError for fields that the format cannot express."""
    if isinstance(fields, ReferencePrompt) != (context.mode == REF2VA):
        raise RequestError(
            f"{type(fields).__name__} does not fit mode={context.mode}; {REF2VA} takes a ReferencePrompt, "
            "every other mode a BasePrompt"
        )
    shots = _shots(fields.shots, context)
    sounds = {
        SOUNDSCAPE: _one(SOUNDSCAPE, fields.overall_soundscape),
        MUSIC: _one(MUSIC, fields.non_diegetic_music),
    }
    if isinstance(fields, ReferencePrompt):
        types = " + ".join(_task_types(fields.task_types))
        sections = {
            DEFINITIONS: "\n".join(_lines(DEFINITIONS, fields.definitions)),
            SUMMARY: f"[{types}] {_one(SUMMARY, fields.summary)}",
            RETENTION: "\n".join(_lines(RETENTION, fields.retention)),
            REFERENCE_MAIN: "\n".join([_one("style", fields.style), *shots]),
            **sounds,
        }
        return "\n\n".join(f"{name}:\n{text}" for name, text in sections.items())
    if context.mode != T2VA and not context.has_first_line:
        raise RequestError(
            f"the format has no first line for {context.these_keyframes}; use first and last frame alone, or write the "
            "prompt by hand"
        )
    opening = first_line(context.mode, len(shots), context.seconds)
    sections = {BASE_MAIN: " ".join(shots), **sounds}
    return "\n\n".join([*([opening] if opening else []), *(f"{name}: {text}" for name, text in sections.items())])


def _shots(shots: tuple[Shot, ...], context: PromptContext) -> list[str]:
    if not shots:
        raise RequestError("there is no shot; describe at least one")
    texts, previous = [], 0
    for number, shot in enumerate(shots, start=1):
        text = _one(f"shot {number}", shot.text)
        if parse(text).shots:
            raise RequestError(
                f"shot {number} holds a [Shot N] marker; leave the markers out, they are written for you"
            )
        texts.append(f"[Shot {number}]{_time(number, shot.start_ms, previous, context)} {text}")
        previous = shot.start_ms or 0
    return texts


def _time(number: int, start_ms: int | None, previous: int, context: PromptContext) -> str:
    if number == 1:
        if start_ms is not None:
            raise RequestError("shot 1 has a time; it begins at 0, leave the time out")
        return ""
    if start_ms is None:
        raise RequestError(f"shot {number} has no time; say when the cut comes, for example 00:03.200")
    if start_ms <= previous:
        raise RequestError(
            f"shot {number} begins at {shot_time(start_ms)}, not after {shot_time(previous)}; times must increase"
        )
    if start_ms >= context.duration_s * 1000:
        raise RequestError(
            f"shot {number} begins at {shot_time(start_ms)}, and the video ends at {context.seconds} s "
            f"(frames={context.num_frames}); move it forward or make the video longer"
        )
    return f" At {shot_time(start_ms)},"


def _task_types(types: tuple[str, ...]) -> tuple[str, ...]:
    if not types:
        raise RequestError(f"no task type is given; use one or more of {', '.join(TASK_TYPES)}")
    for name in types:
        if name not in TASK_TYPES:
            raise RequestError(f"{excerpt(name)} is no task type; use one or more of {', '.join(TASK_TYPES)}")
        if types.count(name) > 1:
            raise RequestError(f"the task type {name} is given more than once; name each once")
    return types


def _lines(name: str, lines: tuple[str, ...]) -> tuple[str, ...]:
    if not lines:
        raise RequestError(f"{name} is empty; write one line for each label")
    for line in lines:
        if "\n" in _one(name, line) or "\r" in line:
            raise RequestError(f"{excerpt(line)} in {name} is more than one line; split it")
    return lines


def _one(name: str, text: str) -> str:
    """``text``. Raises RequestError when there is none, or when it would end its section early."""
    if not text.strip():
        raise RequestError(
            f"{name} is empty; describe it" + (f", or write {NONE}" if name in (SOUNDSCAPE, MUSIC) else "")
        )
    inside = parse(text).sections
    if inside:
        raise RequestError(f"{name} holds the section name {excerpt(inside[0].head)}; give the text of one field alone")
    return text
