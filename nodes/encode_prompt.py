"""H3 Encode Prompt: text and size become the conditioning."""

from comfy_api.latest import io

from comfyui_h3.h3core.engine import Engine
from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media.canvas import FPS, MAX_FRAMES, MAX_SIDE, MIN_FRAMES, SIDE_MULTIPLE
from comfyui_h3.h3core.request import DEFAULT_NUM_FRAMES
from comfyui_h3.h3core.types import Request
from comfyui_h3.nodes._compat import make
from comfyui_h3.nodes.checks import expect, judge_prompt
from comfyui_h3.nodes.memory import make_room
from comfyui_h3.nodes.progress import HostProgress, LoadProgress
from comfyui_h3.nodes.types import H3Conditioning, H3Engine, H3Media

SIDE = f"pixels; a multiple of {SIDE_MULTIPLE} from {SIDE_MULTIPLE} to {MAX_SIDE}, at most 4:1"


class H3EncodePrompt(io.ComfyNode):
    """The size belongs to the prompt: both are what the transformer is conditioned on."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="H3EncodePrompt",
            display_name="H3 Encode Prompt",
            category="MiniMax H3",
            description="Encodes the prompt, and sets the size and the length of the video.",
            search_aliases=["minimax", "hailuo", "h3", "t2va", "text encode", "prompt"],
            inputs=[
                H3Engine.Input("engine", tooltip="From Load H3."),
                io.String.Input(
                    "prompt",
                    multiline=True,
                    default="",
                    tooltip="What is seen, said and heard. H3 is trained on the three sections that the shipped "
                    "workflow shows; it takes plain prose too. Usual length: up to 7,000 characters.",
                ),
                io.Int.Input(
                    "width",
                    default=1344,
                    min=SIDE_MULTIPLE,
                    max=MAX_SIDE,
                    step=SIDE_MULTIPLE,
                    tooltip=f"Width in {SIDE}. Trained up to the area of 1344 x 768.",
                ),
                io.Int.Input(
                    "height",
                    default=768,
                    min=SIDE_MULTIPLE,
                    max=MAX_SIDE,
                    step=SIDE_MULTIPLE,
                    tooltip=f"Height in {SIDE}. Trained up to the area of 1344 x 768.",
                ),
                io.Int.Input(
                    "frames",
                    default=DEFAULT_NUM_FRAMES,
                    min=MIN_FRAMES,
                    max=MAX_FRAMES,
                    step=17,
                    tooltip=f"Length in frames at {FPS} per second: 17k + 5 from {MIN_FRAMES} to {MAX_FRAMES}. "
                    "124 is 5.2 s, 243 is 10.1 s. Trained on 107 to 362 (4 to 15 s).",
                ),
                H3Media.Input("media", optional=True, tooltip="Pictures, clips and sounds that the prompt refers to."),
            ],
            outputs=[H3Conditioning.Output("conditioning", display_name="conditioning", tooltip="For H3 Sample DiT.")],
        )

    @classmethod
    def validate_inputs(cls, prompt=None, width=None, height=None, frames=None) -> bool | str:
        return judge_prompt(prompt, width, height, frames)

    @classmethod
    def execute(cls, engine, prompt, width, height, frames, media=None) -> io.NodeOutput:
        if media is not None:
            raise RequestError("media is connected, and this version makes video from text alone; disconnect it")
        engine = expect(engine, Engine, "Load H3")
        request = Request(prompt=prompt, width=width, height=height, num_frames=frames)
        make_room(engine, "encode")
        on_load, on_progress = LoadProgress("the text encoder"), HostProgress("Encoding the prompt")
        return io.NodeOutput(engine.encode(request, on_progress=on_progress, on_load=on_load))
