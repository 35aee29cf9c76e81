"""H3 Canvas: a ratio and a duration become the size and the frames of a video."""

import torch
from comfy_api.latest import io

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.estimate import DIT_BYTES, RELEASE_FORWARDS, TEXT_ENCODER_BYTES, estimate
from comfyui_h3.h3core.media.canvas import (
    FPS,
    MAX_FRAMES,
    MAX_SIDE,
    SHORT_EDGE,
    SIDE_MULTIPLE,
    canvas_for_ratio,
    frames_for_duration,
)
from comfyui_h3.h3core.request import resolve_size
from comfyui_h3.nodes._compat import make
from comfyui_h3.nodes.checks import UNLINKED, check_choice, check_short_edge, expect, verdict
from comfyui_h3.nodes.progress import notice_text, show_text

AUTO = "auto"
RATIOS = {"16:9": (16, 9), "21:9": (21, 9), "4:3": (4, 3), "1:1": (1, 1), "3:4": (3, 4), "9:16": (9, 16)}


class H3Canvas(io.ComfyNode):
    """Sizes of one's own go straight into the encode nodes; this one has those of the release."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="H3Canvas",
            display_name="H3 Canvas",
            category="MiniMax H3",
            description="Width, height and frames for a ratio and a duration, by the rules of the release, and what "
            "they cost. Feeds the media node and H3 Encode Prompt alike.",
            search_aliases=["minimax", "hailuo", "h3", "resolution", "aspect ratio", "size", "duration", "length"],
            inputs=[
                io.Combo.Input(
                    "aspect",
                    options=[*RATIOS, AUTO],
                    default="16:9",
                    tooltip="Width to height. auto: that of image, as the release does with the first keyframe.",
                ),
                io.Int.Input(
                    "short_edge",
                    default=SHORT_EDGE,
                    min=SIDE_MULTIPLE,
                    max=MAX_SIDE,
                    step=SIDE_MULTIPLE,
                    tooltip=f"Short side in pixels, {SIDE_MULTIPLE} to {MAX_SIDE}; less where the area would pass that "
                    "of 1344 x 768. The release uses 768.",
                ),
                io.Float.Input(
                    "duration",
                    default=5.0,
                    min=0.1,
                    max=float(MAX_FRAMES // FPS),
                    step=0.1,
                    tooltip=f"Seconds, 0.1 to {MAX_FRAMES // FPS}; rounded up to the next length of 17k + 5 frames. "
                    "Trained on 4 to 15.",
                ),
                io.Image.Input("image", optional=True, tooltip="Its ratio is taken with aspect=auto; 1:4 to 4:1."),
            ],
            outputs=[
                io.Int.Output("width", display_name="width", tooltip="Pixels, a multiple of 32."),
                io.Int.Output("height", display_name="height", tooltip="Pixels, a multiple of 32."),
                io.Int.Output("frames", display_name="frames", tooltip="17k + 5, at 24 per second."),
                io.String.Output("summary", display_name="summary", tooltip="What this node shows, as text."),
            ],
        )

    @classmethod
    def validate_inputs(cls, aspect=None, short_edge=None, duration=None, image=UNLINKED) -> bool | str:
        return verdict(
            lambda: check_aspect(aspect, has_image=image is not UNLINKED),
            lambda: check_short_edge(short_edge),
            lambda: duration is None or frames_for_duration(duration),
        )

    @classmethod
    def execute(cls, aspect, short_edge, duration, image=None) -> io.NodeOutput:
        check_aspect(str(aspect), has_image=image is not None)
        check_short_edge(short_edge)
        ratio = RATIOS.get(aspect) or image_size(image)
        width, height = canvas_for_ratio(*ratio, short_edge)
        frames = frames_for_duration(duration)
        text = summary(width, height, frames)
        show_text(text)
        return io.NodeOutput(width, height, frames, text)


def check_aspect(aspect: str | None, has_image: bool) -> None:
    """Raises RequestError for a ratio that is not in the list, and for "auto" without an image."""
    check_choice("aspect", aspect, (*RATIOS, AUTO))
    if aspect == AUTO and not has_image:
        raise RequestError("aspect=auto takes the ratio of image, which is not connected; connect it or choose a ratio")


def image_size(image: object) -> tuple[int, int]:
    """(width, height) of an IMAGE, whatever its pixels are. Raises RequestError for what is none."""
    shape = tuple(expect(image, torch.Tensor, "a node that gives IMAGE").shape)
    if len(shape) not in (3, 4) or shape[-1] not in (1, 2, 3, 4) or 0 in shape:
        raise RequestError(f"image has the shape {shape}; it must be (batch, height, width, channels)")
    return shape[-2], shape[-3]


def summary(width: int, height: int, frames: int) -> str:
    """Size, length, rows and cost in four lines; a fifth when the size is unusual."""
    cost = estimate(width, height, frames)
    forward = cost.forward_flops / 1e15
    _, notices = resolve_size(width, height, frames, None, "t2va")
    lines = (
        f"{width}x{height}, {frames} frames ({frames / FPS:.2f} s)",
        f"{cost.num_rows:,} rows ({cost.num_video_rows:,} video, {cost.num_audio_rows:,} audio) and the prompt's",
        f"{forward:.3g} PFLOP a forward, {RELEASE_FORWARDS * forward:.3g} for {RELEASE_FORWARDS} forwards",
        f"activations {cost.activation_bytes / 2**30:.1f} GiB, weights {DIT_BYTES / 2**30:.1f} GiB after "
        f"{TEXT_ENCODER_BYTES / 2**30:.1f} GiB of the text encoder; {cost.resident_bytes / 2**30:.0f} GiB where all "
        "of it stays on the GPU (released model, bf16)",
        notice_text(notices),
    )
    return "\n".join(filter(None, lines))
