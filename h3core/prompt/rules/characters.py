"""Letters that look like others and are not: a marker written with them is other tokens, and no marker."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator
from operator import itemgetter

from comfyui_h3.h3core.models.text_encoder.tokens import CONTROL_TOKENS
from comfyui_h3.h3core.prompt.context import PromptContext
from comfyui_h3.h3core.prompt.findings import Finding, error, excerpt, warning
from comfyui_h3.h3core.prompt.grammar import BASE_SECTIONS, REFERENCE_SECTIONS
from comfyui_h3.h3core.prompt.parse import ParsedPrompt

DOUBLE_QUOTES = "\u201c\u201d\u201e\u201f\u2033\u275d\u275e\uff02"
SINGLE_QUOTES = "\u2018\u2019\u201a\u201b\u2032\u275b\u275c\uff07"
_BRACKETS = {
    "（": "(",
    "）": ")",
    "［": "[",
    "］": "]",
    "【": "[",
    "】": "]",
    "＜": "<",
    "＞": ">",
    "〈": "<",
    "〉": ">",
}
_BRACKETS |= {
    "《": "<",
    "》": ">",
    "〔": "[",
    "〕": "]",
    "｛": "{",
    "｝": "}",
    "「": "[",
    "」": "]",
    "『": "[",
    "』": "]",
}
SPACES = "\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
WITHIN_MARKERS = "：＃"  # usual in front of a marker, and wrong only inside one
INVISIBLE = "\u00ad\u200b\u200c\u200d\u2060\ufeff"
OF_OTHER_SCRIPTS = "\u200c\u200d\u3000"  # joiners and the wide space: usual there, wrong at a marker
_BIDI = "\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u061c"
_FULL_WIDTH = {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
_PLAIN = str.maketrans(
    {
        **_FULL_WIDTH,
        **_BRACKETS,
        **dict.fromkeys(DOUBLE_QUOTES, '"'),
        **dict.fromkeys(SINGLE_QUOTES, "'"),
        **dict.fromkeys(SPACES, " "),
    }
)
"""One letter for one, so that places stay the same."""
_ODD = re.compile(
    f"[{re.escape(DOUBLE_QUOTES + SINGLE_QUOTES + ''.join(_BRACKETS) + SPACES + INVISIBLE + WITHIN_MARKERS)}]"
)
_MARKER = re.compile(
    r"</?d>|<scenetrans>|<cutoff>|\[Shot \d{1,4}\](?: At \d\d:\d\d\.\d{3})?|(?<=<d>)\[[^\[\]\r\n]{1,40}\]"
    r"|<(?:Subject|Picture|Video|Audio) \d{1,6}>|\(S\d{1,3}(?:,S\d{1,3}){0,20}\)"
    rf"|\b(?:{'|'.join(dict.fromkeys((*BASE_SECTIONS, *REFERENCE_SECTIONS)))}):"
)
_QUOTED = re.compile(r'"[^"\r\n]{0,300}"')
_WORDS = re.compile(r"<d>(?:\[[^\[\]\r\n]{1,40}\])?")
_SPECIAL = re.compile(r"<\|[^|<>\r\n]{1,40}\|>|</?(?:tool_call|tool_response|think)>")


def lookalikes(parsed: ParsedPrompt, context: PromptContext) -> Iterator[Finding]:
    """Typographic quotes, full-width brackets and unusual spaces: errors at a marker, else a warning.

    Double quotes are markers themselves: visible text stands in them. Spoken words and visible text keep their own
    punctuation.
    """
    if not _ODD.search(parsed.text):
        return
    plain = parsed.text.translate(_PLAIN)
    markers = [found.span() for found in _MARKER.finditer(plain)]
    free = _own_punctuation(parsed.text, plain)
    elsewhere: dict[str, list[int]] = {}
    for found in _ODD.finditer(parsed.text):
        place, letter = found.start(), found[0]
        allowed = letter in WITHIN_MARKERS or (letter not in SPACES + INVISIBLE and _is_within(free, place))
        marker = _marker_at(markers, place, touching=not allowed)
        if marker is not None:
            yield error(
                "odd-character",
                f"{_named(letter)} at {excerpt(parsed.text[slice(*marker)])}: the marker is read as other tokens; "
                "replace it by the plain character",
                parsed.line_of(place),
            )
        elif not allowed and letter in DOUBLE_QUOTES:
            yield error(
                "odd-quotes",
                f"{_named(letter)}: visible text stands in plain double quotes; these are other tokens, replace them",
                parsed.line_of(place),
            )
        elif not allowed and letter not in OF_OTHER_SCRIPTS:
            elsewhere.setdefault(_kind(letter), []).append(place)
    for kind, places in elsewhere.items():
        yield warning(
            f"odd-{kind}",
            f"{_named(parsed.text[places[0]])} and others like it ({len(places)}) are other tokens than plain {kind}; "
            "replace them outside of spoken words and visible text",
            parsed.line_of(places[0]),
        )


def _marker_at(markers: list[tuple[int, int]], place: int, *, touching: bool) -> tuple[int, int] | None:
    """The marker with ``place`` inside it or, with ``touching``, right in front of it or behind it."""
    index = bisect_right(markers, place, key=itemgetter(0))
    near = markers[max(0, index - 1) : index + 1]
    inside = [(start, end) for start, end in near if start <= place < end]
    beside = [(start, end) for start, end in near if touching and start - 1 <= place <= end]
    return next(iter(inside + beside), None)


def _kind(letter: str) -> str:
    if letter in SINGLE_QUOTES:
        return "apostrophes"
    return "spaces" if letter in SPACES + INVISIBLE else "brackets"


def _own_punctuation(text: str, plain: str) -> list[tuple[int, int]]:
    """Spans of spoken words (behind the language) and of text in plain quotes, in order."""
    spans: list[tuple[int, int]] = []
    position = 0
    for found in _WORDS.finditer(plain):
        if found.start() < position:
            continue
        spans += [quoted.span() for quoted in _QUOTED.finditer(text, position, found.start())]
        position = plain.find("</d>", found.end())
        if position < 0:
            position = len(plain)
        spans.append((found.end(), position))
    return spans + [quoted.span() for quoted in _QUOTED.finditer(text, position)]


def _is_within(spans: list[tuple[int, int]], place: int) -> bool:
    index = bisect_right(spans, place, key=itemgetter(0)) - 1
    return index >= 0 and spans[index][0] <= place < spans[index][1]


def _named(letter: str) -> str:
    return f"U+{ord(letter):04X} ({unicodedata.name(letter, 'no name').lower()})"


def control(parsed: ParsedPrompt, context: PromptContext) -> Iterator[Finding]:
    """Control characters and direction marks: invisible, and tokens all the same."""
    for name, pattern in (
        ("control characters", "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"),
        ("direction marks", f"[{_BIDI}]"),
        ("carriage returns", "\r"),
    ):
        places = [found.start() for found in re.finditer(pattern, parsed.text)]
        if places:
            yield warning(
                "control-character",
                f"{name} ({len(places)}, first U+{ord(parsed.text[places[0]]):04X}) are invisible and change the "
                "tokens; remove them",
                parsed.line_of(places[0]),
            )


def special_tokens(parsed: ParsedPrompt, context: PromptContext) -> Iterator[Finding]:
    """Strings that the tokenizer reads as one token of its own."""
    for found in _SPECIAL.finditer(parsed.text):
        line = parsed.line_of(found.start())
        if found[0] in CONTROL_TOKENS:
            yield error("special-token", f"{found[0]} is a control token, which the encoder refuses; remove it", line)
        elif found[0] == "<|cutoff|>":
            yield warning(
                "special-token-unusual", "<|cutoff|> is in no published prompt; the guide writes <cutoff>", line
            )
        else:
            yield warning(
                "special-token-unusual", f"{excerpt(found[0])} is or looks like a token of its own; remove it", line
            )
