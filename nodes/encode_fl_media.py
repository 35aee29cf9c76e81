"""H3 Keyframe and H3 Encode FL Media: pictures that the video passes through."""

from comfy_api.latest import io

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media.canvas import MAX_FRAMES
from comfyui_h3.h3core.media.references import LAST_FRAME, Keyframe, MediaRequest
from comfyui_h3.nodes import pictures
from comfyui_h3.nodes._compat import make
from comfyui_h3.nodes.checks import expect_chain, judge_media
from comfyui_h3.nodes.encode_media import encode_media
from comfyui_h3.nodes.inputs import fit_input, size_inputs, strict_input
from comfyui_h3.nodes.progress import show_notices
from comfyui_h3.nodes.types import H3Engine, H3Keyframes, H3Media


class H3Keyframe(io.ComfyNode):
    """One picture at one place; chained, so that a bypass takes out exactly one."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="H3Keyframe",
            display_name="H3 Keyframe",
            category="MiniMax H3",
            description="Adds a picture that the video passes through. Chain several; the order does not matter.",
            search_aliases=["minimax", "hailuo", "h3", "fl2va", "keyframe", "guide", "image to video"],
            inputs=[
                io.Image.Input("image", tooltip="One picture of any size; of a batch, the first."),
                io.Int.Input(
                    "frame",
                    default=0,
                    min=LAST_FRAME,
                    max=MAX_FRAMES - 1,
                    tooltip="Where it stands: 0 the first frame, -1 the last. In between: where a latent frame begins, "
                    f"17k + 0, 1, 5, 9 or 13, up to {MAX_FRAMES - 1}; H3 was not trained on those.",
                ),
                H3Keyframes.Input("keyframes", optional=True, tooltip="From another H3 Keyframe."),
            ],
            outputs=[
                H3Keyframes.Output(
                    "all_keyframes",
                    display_name="keyframes",
                    tooltip="For H3 Encode FL Media, H3 Encode Ref Media or the next H3 Keyframe.",
                )
            ],
        )

    @classmethod
    def execute(cls, image, frame, keyframes=()) -> io.NodeOutput:
        keyframes = expect_chain(keyframes, Keyframe, "H3 Keyframe")
        pixels, notices = pictures.from_host(image, f"the keyframe at frame {frame}")
        show_notices(notices)
        return io.NodeOutput((*keyframes, Keyframe(pixels=pixels, frame=frame, notices=notices)))


class H3EncodeFLMedia(io.ComfyNode):
    """First and last frame, and what lies between; the text encoder sees them in the order of time."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="H3EncodeFLMedia",
            display_name="H3 Encode FL Media",
            category="MiniMax H3",
            description="Encodes first frame, last frame and other keyframes for one size and length of the video. "
            "Needs the fl2va weights.",
            search_aliases=["minimax", "hailuo", "h3", "fl2va", "i2va", "image to video", "first frame", "last frame"],
            inputs=[
                H3Engine.Input("engine", tooltip="From Load H3."),
                *size_inputs(),
                io.Image.Input(
                    "first_frame", optional=True, tooltip="Picture at frame 0; any size, of a batch the first."
                ),
                io.Image.Input(
                    "last_frame",
                    optional=True,
                    tooltip="Picture at the last frame; any size, of a batch the first.",
                ),
                H3Keyframes.Input("keyframes", optional=True, tooltip="More keyframes, from H3 Keyframe."),
                fit_input(),
                strict_input(),
            ],
            outputs=[H3Media.Output("media", display_name="media", tooltip="For H3 Encode Prompt.")],
        )

    @classmethod
    def validate_inputs(cls, width=None, height=None, frames=None, fit=None) -> bool | str:
        return judge_media(width, height, frames, fit)

    @classmethod
    def execute(
        cls, engine, width, height, frames, fit, first_frame=None, last_frame=None, keyframes=(), strict=False
    ) -> io.NodeOutput:
        request = MediaRequest(
            width=width,
            height=height,
            num_frames=frames,
            keyframes=collect_keyframes(first_frame, last_frame, keyframes),
            fit=fit,
            strict=strict,
        )
        return io.NodeOutput(encode_media(engine, request))


def collect_keyframes(first_frame: object, last_frame: object, keyframes: object) -> tuple[Keyframe, ...]:
    """The chain, then the pictures at both ends; None is not connected. Raises RequestError when nothing is."""
    collected = list(expect_chain(keyframes, Keyframe, "H3 Keyframe"))
    for image, frame, name in ((first_frame, 0, "first_frame"), (last_frame, LAST_FRAME, "last_frame")):
        if image is not None:
            pixels, notices = pictures.from_host(image, name)
            collected.append(Keyframe(pixels=pixels, frame=frame, notices=notices))
    if not collected:
        raise RequestError(
            "no picture is connected: connect first_frame, last_frame or keyframes; for video from text alone, "
            "leave out this node"
        )
    return tuple(collected)
