"""H3's prompt format: fields -> prompt text, and prompt text -> errors and warnings."""

from comfyui_h3.h3core.prompt.builder import BasePrompt, ReferencePrompt, Shot, build
from comfyui_h3.h3core.prompt.checker import check
from comfyui_h3.h3core.prompt.context import AUTO, PromptContext, context_for, detect_mode
from comfyui_h3.h3core.prompt.fields import read_lines, read_shots, read_task_types
from comfyui_h3.h3core.prompt.findings import Finding, Report
from comfyui_h3.h3core.prompt.grammar import LANGUAGES, MODES, REF2VA, TASK_TYPES
from comfyui_h3.h3core.prompt.parse import ParsedPrompt, parse

__all__ = [
    "AUTO",
    "LANGUAGES",
    "MODES",
    "REF2VA",
    "TASK_TYPES",
    "BasePrompt",
    "Finding",
    "ParsedPrompt",
    "PromptContext",
    "ReferencePrompt",
    "Report",
    "Shot",
    "build",
    "check",
    "context_for",
    "detect_mode",
    "parse",
    "read_lines",
    "read_shots",
    "read_task_types",
]
