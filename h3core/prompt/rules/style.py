"""Habits of the training data: lengths, cut verbs, camera words, music without moods. Warnings only."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from comfyui_h3.h3core.prompt.context import PromptContext
from comfyui_h3.h3core.prompt.findings import Finding, excerpt, warning
from comfyui_h3.h3core.prompt.grammar import MUSIC, NONE, SOUNDSCAPE, main_section_of
from comfyui_h3.h3core.prompt.parse import ParsedPrompt
from comfyui_h3.h3core.request import HOSTED_PROMPT_CHARACTERS

MAX_SENTENCES = {SOUNDSCAPE: 4, MUSIC: 3}
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]+[\"')\]]{0,2}(?=\s|$)")
_CUT = re.compile(
    r",? ?(?:then )?(?:the camera cuts to|the shot (?:cuts|transitions|changes|switches) to"
    r"|(?:the (?:shot|camera|scene|image|picture) |a |an )?(?:slow |quick )?"
    r"(?:cross-?dissolves?|dissolves?|fades?|wipes?)\b)",
    re.IGNORECASE,
)
_AMPLITUDE = re.compile(r"\bwith (?:a |an )?(?:very )?([a-z]{1,20}) amplitude\b", re.IGNORECASE)
_SPEED = re.compile(r"\bat (?:a |an )?(?:very )?([a-z]{1,20}) (?:speed|pace)\b", re.IGNORECASE)
_ADVERB = re.compile(
    r"\bcamera (?:[a-z]+ ){0,2}?(slowly|quickly|rapidly|gently|gradually|swiftly|fast)\b"
    r"|\bcamera (?:pushes|pulls|zooms|pans|trucks|tilts|pedestals|arcs|tracks|rolls|moves|dollies)\b[^.,;<]{0,40}?"
    r"\b(slowly|quickly|rapidly|gently|gradually|swiftly)\b",
    re.IGNORECASE,
)
_MOOD = re.compile(
    r"\b(anxious|calming|cheerful|comforting|dreamy|eerie|emotional|energetic|epic|foreboding|gloomy|happy|haunting|"
    r"heartwarming|heroic|hopeful|inspiring|inspirational|intimate|joyful|melancholic|melancholy|moody|mournful|"
    r"mysterious|mystical|nostalgic|ominous|optimistic|peaceful|playful|poignant|romantic|sad|scary|sentimental|"
    r"serene|sinister|somber|sombre|spooky|suspenseful|tender|tense|tragic|triumphant|uplifting|whimsical|wistful|"
    r"evok\w{1,6}|mood|feeling|emotion)\b",
    re.IGNORECASE,
)


def length(parsed: ParsedPrompt, context: PromptContext) -> Iterator[Finding]:
    if len(parsed.text) > HOSTED_PROMPT_CHARACTERS:
        yield warning(
            "long",
            f"the prompt has {len(parsed.text)} characters, and the hosted service takes {HOSTED_PROMPT_CHARACTERS}; "
            "shorten it",
        )


def sound(parsed: ParsedPrompt, context: PromptContext) -> Iterator[Finding]:
    """1 to 4 sentences of soundscape, 1 to 3 of music, and no moods in the music."""
    for name, most in MAX_SENTENCES.items():
        section = parsed.section(name)
        if section is None or parsed.body(section).strip() in ("", NONE):
            continue
        text, line = parsed.body(section), parsed.line_of(section.start)
        count = len(_SENTENCE_END.findall(text.strip())) or 1
        if count > most:
            yield warning(f"long-{name.split('_')[-1]}", f"{name}: has {count} sentences; use 1 to {most}", line)
        if re.fullmatch(r"(?:n/?a|none|no music|no sound|silence|nothing)[.!]?", text.strip(), re.IGNORECASE):
            yield warning("not-applicable", f"{excerpt(text.strip())} is written {NONE} in {name}:", line)
        if name == MUSIC:
            moods = dict.fromkeys(found[1].lower() for found in _MOOD.finditer(text))
            if moods:
                yield warning(
                    "mood-words",
                    f"{', '.join(list(moods)[:8])}: describe music by instruments, tempo and dynamics, not by moods",
                    line,
                )


def cuts(parsed: ParsedPrompt, context: PromptContext) -> Iterator[Finding]:
    for shot in parsed.shots[1:]:
        if shot.time is not None and not _CUT.match(parsed.text, shot.body):
            begin = excerpt(parsed.text[shot.body : min(shot.end, shot.body + 80)].strip(" ,"), 40)
            yield warning(
                "cut-verb",
                f"the shot begins with {begin}; begin with the camera cuts to …, "
                "or the shot cuts / transitions / changes / switches to …",
                parsed.line_of(shot.start),
            )


def camera(parsed: ParsedPrompt, context: PromptContext) -> Iterator[Finding]:
    """Amplitude is small or large, speed slow or fast; other words were not trained."""
    start, end = parsed.main_span(main_section_of(context.mode))
    for found in _AMPLITUDE.finditer(parsed.text, start, end):
        if found[0].lower() not in ("with small amplitude", "with large amplitude"):
            yield warning(
                "camera-amplitude",
                f"{excerpt(found[0])}: write with small amplitude, with large amplitude, or nothing",
                parsed.line_of(found.start()),
            )
    for found in _SPEED.finditer(parsed.text, start, end):
        sentence = parsed.text[max(start, found.start() - 200) : found.start()]
        of_camera = "camera" in re.split(r"[.!?]\s", sentence)[-1].lower()
        if of_camera and found[0].lower() not in ("at slow speed", "at fast speed"):
            yield warning(
                "camera-speed",
                f"{excerpt(found[0])}: write at slow speed, at fast speed, or nothing",
                parsed.line_of(found.start()),
            )
    for found in _ADVERB.finditer(parsed.text, start, end):
        yield warning(
            "camera-speed",
            f"{excerpt(found[0])}: the speed of a camera is written at slow speed or at fast speed",
            parsed.line_of(found.start()),
        )


def language(parsed: ParsedPrompt, context: PromptContext) -> Iterator[Finding]:
    """The description is in English; spoken words and visible text keep their language."""
    start, end = parsed.main_span(main_section_of(context.mode))
    text = re.sub(r"<d>[^<]*(?:</d>|$)|\"[^\"\r\n]{0,300}\"|“[^”\r\n]{0,300}”", "", parsed.text[start:end])
    letters = [letter for letter in text if letter.isalpha()]
    foreign = sum(not unicodedata.name(letter, "").startswith("LATIN") for letter in letters)
    if foreign * 5 > len(letters):
        yield warning(
            "not-english",
            "the description is not in English, which H3 was trained on; spoken words and visible text alone keep "
            "their language",
            parsed.line_of(start),
        )
