"""H3 Encode Prompt: text, media and size become the conditioning."""

from comfy_api.latest import io

from comfyui_h3.h3core.engine import Engine
from comfyui_h3.h3core.types import Request
from comfyui_h3.nodes._compat import make
from comfyui_h3.nodes.checks import UNLINKED, expect, expect_media, judge_prompt
from comfyui_h3.nodes.inputs import size_inputs, strict_input
from comfyui_h3.nodes.memory import make_room
from comfyui_h3.nodes.progress import HostProgress, LoadProgress, show_notices
from comfyui_h3.nodes.types import H3Conditioning, H3Engine, H3Media


class H3EncodePrompt(io.ComfyNode):
    """The size belongs to the prompt: both are what the transformer is conditioned on."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="H3EncodePrompt",
            display_name="H3 Encode Prompt",
            category="MiniMax H3",
            description="Encodes the prompt, behind its media, and sets the size and the length of the video.",
            search_aliases=["minimax", "hailuo", "h3", "t2va", "fl2va", "ref2va", "text encode", "prompt"],
            inputs=[
                H3Engine.Input("engine", tooltip="From Load H3."),
                io.String.Input(
                    "prompt",
                    multiline=True,
                    default="",
                    tooltip="What is seen, said and heard. H3 is trained on the sections that the shipped workflows "
                    "show; it takes plain prose too. Media are called <Picture 1>, <Video 1>, <Audio 1> in the order "
                    "they are connected. Usual length: up to 7,000 characters.",
                ),
                *size_inputs(),
                H3Media.Input(
                    "media",
                    optional=True,
                    tooltip="Pictures, clips and sounds that the prompt refers to, encoded for the same size and "
                    "length. From H3 Encode FL Media or H3 Encode Ref Media; without: video from text alone.",
                ),
                strict_input(),
            ],
            outputs=[H3Conditioning.Output("conditioning", display_name="conditioning", tooltip="For H3 Sample DiT.")],
        )

    @classmethod
    def validate_inputs(cls, prompt=None, width=None, height=None, frames=None, media=UNLINKED) -> bool | str:
        return judge_prompt(prompt, width, height, frames, has_media=media is not UNLINKED)

    @classmethod
    def execute(cls, engine, prompt, width, height, frames, media=None, strict=False) -> io.NodeOutput:
        engine = expect(engine, Engine, "Load H3")
        media = expect_media(media)
        request = Request(prompt=prompt, width=width, height=height, num_frames=frames, strict=strict)
        make_room(engine, "encode", media)
        on_load, on_progress = LoadProgress("the text encoder"), HostProgress("Encoding the prompt")
        conditioning = engine.encode(request, media, on_progress=on_progress, on_load=on_load)
        show_notices(conditioning.notices)
        return io.NodeOutput(conditioning)
