"""H3 Prompt Checker: a prompt passes unchanged, or stops the job with what is wrong with it."""

from comfy_api.latest import io

from comfyui_h3.h3core.engine import Engine
from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media.canvas import MIN_FRAMES, check_num_frames
from comfyui_h3.h3core.prompt import AUTO, MODES, Report, check, context_for
from comfyui_h3.h3core.request import check_prompt
from comfyui_h3.nodes._compat import make
from comfyui_h3.nodes.checks import expect, expect_media, verdict
from comfyui_h3.nodes.inputs import frames_input
from comfyui_h3.nodes.progress import show_text
from comfyui_h3.nodes.prompt_examples import PROMPT
from comfyui_h3.nodes.types import H3Engine, H3Media

SHOWN_ERRORS = 10


class H3PromptChecker(io.ComfyNode):
    """The text goes through byte for byte: what the checker finds, the user changes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="H3PromptChecker",
            display_name="H3 Prompt Checker",
            category="MiniMax H3",
            description="Checks a prompt against the format H3 was trained on, and passes it on unchanged.",
            search_aliases=["minimax", "hailuo", "h3", "prompt", "validate", "lint", "t2va", "fl2va", "ref2va"],
            inputs=[
                io.String.Input(
                    "prompt",
                    multiline=True,
                    default=PROMPT,
                    tooltip="The whole prompt, as H3 Encode Prompt gets it. It is never changed.",
                ),
                io.Combo.Input(
                    "mode",
                    options=[AUTO, *MODES],
                    default=AUTO,
                    tooltip="What the prompt is for: text alone (t2va), a first frame, first and last frame, a last "
                    "frame, or references (ref2va). auto: decided by the connected media, else by the prompt.",
                ),
                frames_input("Connected media know their own, and win."),
                io.Boolean.Input(
                    "stop_on_errors",
                    default=True,
                    tooltip="Stop the job when there are errors. Off: only report them; H3 runs plain prose as well.",
                ),
                H3Media.Input(
                    "media", optional=True, tooltip="The media of the prompt: its labels are compared with them."
                ),
                H3Engine.Input(
                    "engine", optional=True, tooltip="From Load H3: counts tokens with the model's tokenizer."
                ),
            ],
            outputs=[
                io.String.Output("checked_prompt", display_name="checked_prompt", tooltip="The prompt, unchanged."),
                io.String.Output("report", display_name="report", tooltip="What was found, one line each."),
            ],
        )

    @classmethod
    def validate_inputs(cls, prompt=None, mode=None, frames=None, stop_on_errors=None) -> bool | str:
        return verdict(
            lambda: check_num_frames(MIN_FRAMES if frames is None else frames),
            lambda: check_prompt("x" if prompt is None or stop_on_errors is False else prompt),
        )

    @classmethod
    def execute(cls, prompt, mode, frames, stop_on_errors, media=None, engine=None) -> io.NodeOutput:
        count_tokens = None if engine is None else expect(engine, Engine, "Load H3").count_tokens
        report = check(prompt, context_for(prompt, mode, frames, expect_media(media)), count_tokens)
        show_text(f"Prompt: {report.headline()}")
        if stop_on_errors and report.errors:
            raise RequestError(refusal(report))
        return io.NodeOutput(prompt, report.text())


def refusal(report: Report) -> str:
    """The message that stops a job: the first error in the first line, more below it."""
    count = len(report.errors)
    first, *others = report.errors[:SHOWN_ERRORS]
    number = "an error" if count == 1 else f"{count} errors"
    lines = [f"the prompt has {number}: {first.where}{first.message} (or turn stop_on_errors off)"]
    lines += [str(finding) for finding in others]
    if count > SHOWN_ERRORS:
        lines.append(f"and {count - SHOWN_ERRORS} more")
    return "\n".join(lines)
