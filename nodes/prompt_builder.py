"""H3 Prompt Builder: fields become a prompt in the format H3 was trained on."""

from typing import Any

from comfy_api.latest import io

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media.canvas import MAX_FRAMES, align_num_frames
from comfyui_h3.h3core.prompt import (
    MODES,
    REF2VA,
    TASK_TYPES,
    BasePrompt,
    PromptContext,
    ReferencePrompt,
    build,
    check,
    context_for,
    read_lines,
    read_shots,
    read_task_types,
)
from comfyui_h3.h3core.types import EncodedMedia
from comfyui_h3.nodes._compat import make
from comfyui_h3.nodes.checks import expect_media, verdict
from comfyui_h3.nodes.encode_media import labels
from comfyui_h3.nodes.inputs import frames_input
from comfyui_h3.nodes.progress import show_text
from comfyui_h3.nodes.prompt_examples import MUSIC, RETENTION, SHOTS, SOUNDSCAPE, STYLE, SUBJECTS, SUMMARY
from comfyui_h3.nodes.types import H3Media


class H3PromptBuilder(io.ComfyNode):
    """Puts the user's own sentences together with the fixed strings; the strings are the library's business."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="H3PromptBuilder",
            display_name="H3 Prompt Builder",
            category="MiniMax H3",
            description="Writes a prompt in the format H3 was trained on: sections, shot markers, times and the first "
            "line of keyframes. Your sentences are put in as they are.",
            search_aliases=["minimax", "hailuo", "h3", "prompt", "t2va", "fl2va", "ref2va"],
            inputs=[
                io.Combo.Input(
                    "mode",
                    options=list(MODES),
                    default=MODES[0],
                    tooltip="What the video is made from: text alone (t2va), a first frame, first and last frame, a "
                    "last frame, or references (ref2va).",
                ),
                frames_input("The same as in H3 Encode Prompt."),
                _text(
                    "shots",
                    SHOTS,
                    "One shot a paragraph, a blank line between two. The first has no time; each other begins with the "
                    "time of its cut, 00:03.200 or 3.2 s, and goes on: the camera cuts to … No [Shot N]: it is written "
                    "for you. Spoken words: the speaker with (S1), then <d>[English] words</d>.",
                ),
                _text(
                    "soundscape", SOUNDSCAPE, "Ambience and the sounds of things and bodies, 1 to 4 sentences, or N/A."
                ),
                _text(
                    "music",
                    MUSIC,
                    "Music that only the audience hears: instruments, tempo, dynamics; 1 to 3 sentences, or N/A.",
                ),
                _text(
                    "subjects",
                    SUBJECTS,
                    "ref2va only. One line for each thing that is referred to: <Subject 1> is … in <Picture 1>, with …",
                ),
                io.String.Input(
                    "task_types",
                    default="reference generation",
                    tooltip="ref2va only. What the references are for, one or more with + between: "
                    f"{', '.join(TASK_TYPES)}.",
                ),
                _text(
                    "summary",
                    SUMMARY,
                    "ref2va only. The video in one or two sentences. For video editing it begins: The target video is "
                    "an edited version of <Video 1>.",
                ),
                _text(
                    "retention",
                    RETENTION,
                    "ref2va only. One line for each label of subjects: <Subject 1> (appears in [Shot 1]): "
                    "fully_preserved - what is kept. Pictures and videos: fully_preserved, partially_preserved, "
                    "attribute_transfer, weak_reference. Sounds: fully_copy, partially_copy, reference, "
                    "weak_reference.",
                ),
                _text("style", STYLE, "ref2va only. The style of the video in one or two sentences."),
                H3Media.Input(
                    "media", optional=True, tooltip="The media of the prompt: the report shows how they are numbered."
                ),
            ],
            outputs=[
                io.String.Output("prompt", display_name="prompt", tooltip="For H3 Encode Prompt."),
                io.String.Output(
                    "report", display_name="report", tooltip="Numbers of the media, and what the checker says."
                ),
            ],
        )

    @classmethod
    def validate_inputs(
        cls,
        mode=None,
        frames=None,
        shots=None,
        soundscape=None,
        music=None,
        subjects=None,
        task_types=None,
        summary=None,
        retention=None,
        style=None,
    ) -> bool | str:
        given = (mode, frames, shots, soundscape, music, subjects, task_types, summary, retention, style)
        fields: list[Any] = [fill if field is None else field for field, fill in zip(given, FILLING, strict=True)]
        return verdict(lambda: assemble(*fields))

    @classmethod
    def execute(
        cls,
        mode,
        frames,
        shots,
        soundscape,
        music,
        subjects,
        task_types,
        summary,
        retention,
        style,
        media=None,
    ) -> io.NodeOutput:
        media = expect_media(media)
        prompt, context = assemble(
            mode, frames, shots, soundscape, music, subjects, task_types, summary, retention, style, media
        )
        report = check(prompt, context)
        show_text(f"Prompt: {report.headline()}")
        connected = [] if media is None else [f"connected: {', '.join(labels(media))}"]
        return io.NodeOutput(prompt, "\n".join([*connected, report.text()]))


def _text(name: str, default: str, tooltip: str) -> io.String.Input:
    return io.String.Input(name, multiline=True, default=default, tooltip=tooltip)


def assemble(
    mode: str,
    frames: int,
    shots: str,
    soundscape: str,
    music: str,
    subjects: str,
    task_types: str,
    summary: str,
    retention: str,
    style: str,
    media: EncodedMedia | None = None,
) -> tuple[str, PromptContext]:
    """The prompt and what it is for. Raises RequestError for fields that the format cannot express."""
    context = context_for("", mode, frames, media)
    if context.num_frames != align_num_frames(frames):
        raise RequestError(
            f"frames={frames}, and the connected media were prepared for {context.num_frames}; give both the same"
        )
    sounds = {"overall_soundscape": soundscape.strip(), "non_diegetic_music": music.strip()}
    if mode != REF2VA:
        return build(BasePrompt(shots=read_shots(shots), **sounds), context), context
    fields = ReferencePrompt(
        definitions=read_lines(subjects),
        task_types=read_task_types(task_types),
        summary=summary.strip(),
        retention=read_lines(retention),
        style=style.strip(),
        shots=read_shots(shots),
        **sounds,
    )
    return build(fields, context), context


FILLING = (MODES[0], MAX_FRAMES, "x", "x", "x", "x", TASK_TYPES[0], "x", "x", "x")
"""For inputs that are linked, while nothing is known of them: what every check lets pass."""
