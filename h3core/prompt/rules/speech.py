"""Spoken lines: their markers, languages, speakers, and voices from off screen."""

from __future__ import annotations

import re
from collections.abc import Iterator

from comfyui_h3.h3core.prompt.context import PromptContext
from comfyui_h3.h3core.prompt.findings import Finding, error, excerpt, warning
from comfyui_h3.h3core.prompt.grammar import BASE_MAIN, LANGUAGES, REFERENCE_MAIN, main_section_of
from comfyui_h3.h3core.prompt.parse import Dialogue, ParsedPrompt

_ALMOST_SPOKEN = re.compile(
    r"<[ \t]{0,2}/?[ \t]{0,2}d[ \t]{0,2}/?[ \t]{0,2}>|</?d(?=[ \t\r\n\[]|$)|</?(?:dialogue|dialog|speech)>|&lt;/?d&gt;",
    re.IGNORECASE,
)
_NOT_LANGUAGES = ("unclear", "language", "lang")
_VOICEOVER = re.compile(r"voice[ -]?over", re.IGNORECASE)
_EXACT_VOICEOVER = "says in an off-screen voiceover"
_LIPS_CLOSED = re.compile(
    r"\b(?:lips|mouth)\b[^.!?]{0,60}\b(?:closed|shut|still|sealed|motionless|together|pressed|unmoving)\b"
    r"|\b(?:closed|sealed|pressed|unmoving|still|motionless) (?:lips|mouth)\b",
    re.IGNORECASE,
)
LIPS_WITHIN = 240  # characters: the clause belongs right behind the line


def markers(parsed: ParsedPrompt, context: PromptContext) -> Iterator[Finding]:
    """``<d>`` and ``</d>`` in pairs and spelled exactly, each with its language and some words."""
    for found in _ALMOST_SPOKEN.finditer(parsed.text):
        if found[0] not in ("<d>", "</d>"):
            yield error(
                "dialogue-marker",
                f"{excerpt(found[0])} is no marker; spoken words stand between <d>[Language] and </d>",
                parsed.line_of(found.start()),
            )
    for place in parsed.stray:
        yield error("dialogue-unbalanced", "</d> has no <d> before it; add it or remove this", parsed.line_of(place))
    for line in parsed.dialogues:
        yield from _language(parsed, line)


def _language(parsed: ParsedPrompt, dialogue: Dialogue) -> Iterator[Finding]:
    number = parsed.line_of(dialogue.start)
    start = excerpt(parsed.text[dialogue.body : dialogue.close], 30)
    if not dialogue.closed:
        yield error("dialogue-unbalanced", f"<d> before {start} is not closed; end the words with </d>", number)
    if dialogue.language is None or dialogue.language.strip().lower() in _NOT_LANGUAGES:
        yield error(
            "dialogue-language", f"no language follows <d> before {start}; write <d>[English] and the words", number
        )
        return
    if dialogue.language not in LANGUAGES:
        yield warning(
            "dialogue-language-unusual",
            f"{excerpt(dialogue.language)} is not one of the languages H3 speaks reliably: {', '.join(LANGUAGES)}",
            number,
        )
    words = parsed.text[dialogue.words : dialogue.close]
    if not words.strip():
        yield warning("dialogue-empty", "<d> holds no words; write them behind the language, or remove it", number)
    elif not words.startswith(" ") or words.startswith("  "):
        yield warning("dialogue-space", f"one space belongs between [{dialogue.language}] and the words", number)


def place(parsed: ParsedPrompt, context: PromptContext) -> Iterator[Finding]:
    """Spoken words belong in the section with the shots and nowhere else."""
    if parsed.section(BASE_MAIN) is None and parsed.section(REFERENCE_MAIN) is None:
        return
    name = main_section_of(context.mode)
    start, end = parsed.main_span(name)
    for dialogue in parsed.dialogues:
        if not start <= dialogue.start < end:
            yield error(
                "dialogue-place",
                f"spoken words stand outside {name}:; move them there and describe here only the sound",
                parsed.line_of(dialogue.start),
            )


def speakers(parsed: ParsedPrompt, context: PromptContext) -> Iterator[Finding]:
    """Who speaks stands before each line; ids count from S1 in the order in which they are first heard."""
    start, end = parsed.main_span(main_section_of(context.mode))
    known = 0
    for speaker in parsed.speakers:
        if not start <= speaker.start < end:
            continue
        line = parsed.line_of(speaker.start)
        if not speaker.exact:
            yield warning(
                "speaker-form",
                f"{excerpt(speaker.written)} is no speaker; write (S1), or (S1,S2) for two at once",
                line,
            )
        for number in speaker.numbers:
            if number > known + 1:
                yield warning(
                    "speaker-order",
                    f"(S{number}) is heard before (S{known + 1}); count in the order of first words",
                    line,
                )
            known = max(known, number)
    yield from _unattributed(parsed, start, end)


def _unattributed(parsed: ParsedPrompt, start: int, end: int) -> Iterator[Finding]:
    """A line needs a speaker, or the ``<Audio N>`` it is heard from, since the line or the shot before it."""
    named = sorted(
        [speaker.start for speaker in parsed.speakers]
        + [label.start for label in parsed.labels if label.kind == "Audio"]
    )
    borders = sorted([start] + [d.close for d in parsed.dialogues] + [shot.start for shot in parsed.shots])
    next_named = next_border = 0
    for dialogue in parsed.dialogues:
        if not start <= dialogue.start < end:
            continue
        while next_border + 1 < len(borders) and borders[next_border + 1] <= dialogue.start:
            next_border += 1
        while next_named < len(named) and named[next_named] < borders[next_border]:
            next_named += 1
        if next_named == len(named) or named[next_named] > dialogue.start:
            words = excerpt(parsed.text[dialogue.words : dialogue.close].strip(), 30)
            yield warning(
                "speaker-missing",
                f"nobody is named before {words}; put the speaker and (S1) before <d>",
                parsed.line_of(dialogue.start),
            )


def voiceover(parsed: ParsedPrompt, context: PromptContext) -> Iterator[Finding]:
    """A voice from off screen: its fixed phrase, and behind the words that the lips stay closed."""
    start, end = parsed.main_span(main_section_of(context.mode))
    dialogues = parsed.dialogues
    for index, dialogue in enumerate(dialogues):
        if not start <= dialogue.start < end:
            continue
        earlier = max(start, dialogues[index - 1].close if index else start, dialogue.start - 400)
        lead = re.split(r"[.!?]\s", parsed.text[earlier : dialogue.start])[-1]
        if not _VOICEOVER.search(lead):
            continue
        line = parsed.line_of(dialogue.start)
        if _EXACT_VOICEOVER not in lead:
            yield warning("voiceover-phrase", f"a voice from off screen is introduced with: {_EXACT_VOICEOVER}", line)
        stop = min(end, dialogues[index + 1].start if index + 1 < len(dialogues) else end, dialogue.close + LIPS_WITHIN)
        if not _LIPS_CLOSED.search(parsed.text, dialogue.close, stop):
            yield warning(
                "voiceover-lips", "right behind the words of a voiceover say that the lips remain closed", line
            )


def marks(parsed: ParsedPrompt, context: PromptContext) -> Iterator[Finding]:
    """``<scenetrans>`` stands at both ends where words cross a cut."""
    count = parsed.text.count("<scenetrans>")
    if count % 2:
        yield warning(
            "scenetrans",
            "<scenetrans> stands where words break off at a cut and again where they go on; one of the two is missing",
            parsed.line_of(parsed.text.rfind("<scenetrans>")),
        )
