"""Prompt text -> errors and warnings: every check of the prompt format, each in a rule of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.models.text_encoder.tokens import MAX_TOKENS
from comfyui_h3.h3core.prompt.context import PromptContext
from comfyui_h3.h3core.prompt.findings import ERROR, Finding, Report, error
from comfyui_h3.h3core.prompt.parse import ParsedPrompt, parse
from comfyui_h3.h3core.prompt.rules import characters, labels, reference, shots, speech, structure, style
from comfyui_h3.h3core.request import check_prompt

Rule = Callable[[ParsedPrompt, PromptContext], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    structure.sections,
    structure.opening,
    structure.code_fences,
    shots.numbering,
    shots.times,
    speech.markers,
    speech.place,
    speech.speakers,
    speech.voiceover,
    speech.marks,
    labels.form,
    labels.subjects,
    labels.attached,
    labels.cited,
    reference.summary,
    reference.retention,
    reference.speakers,
    characters.lookalikes,
    characters.control,
    characters.special_tokens,
    style.length,
    style.sound,
    style.cuts,
    style.camera,
    style.language,
)


def check(prompt: str, context: PromptContext, count_tokens: Callable[[str], int] | None = None) -> Report:
    """What is wrong with ``prompt`` (errors) and what is unusual about it (warnings).

    The engine itself runs any text that has a word in it; errors are what the format does not allow. count_tokens: the
    tokenizer of the model, for the report. Raises only what count_tokens raises.
    """
    found: list[Finding] = []
    try:
        check_prompt(prompt)
    except RequestError as unusable:
        found.append(error("unusable", str(unusable), 1))
    if not isinstance(prompt, str) or not prompt.strip():
        return Report(mode=context.mode, num_frames=context.num_frames, findings=tuple(found))
    parsed = parse(prompt)
    for rule in RULES:
        found.extend(rule(parsed, context))
    num_tokens = count_tokens(prompt) if count_tokens is not None and _is_unicode(prompt) else None
    if num_tokens is not None and num_tokens > MAX_TOKENS:
        found.append(error("too-many-tokens", f"the prompt has {num_tokens} tokens, the encoder reads {MAX_TOKENS}"))
    found.sort(key=lambda finding: (finding.level != ERROR, finding.line or 0))
    return Report(
        mode=context.mode,
        num_frames=context.num_frames,
        findings=tuple(found),
        num_characters=len(prompt),
        num_tokens=num_tokens,
    )


def _is_unicode(text: str) -> bool:
    """Whether a tokenizer can read it: a text with half a character is no text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
