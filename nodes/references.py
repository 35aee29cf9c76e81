"""H3 Reference Image, Video and Audio, chained, and H3 Encode Ref Media: media that the video takes from."""

from typing import Any, Literal

from comfy_api.latest import io

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media.canvas import MAX_SIDE, SHORT_EDGE, SIDE_MULTIPLE, check_ratio
from comfyui_h3.h3core.media.pictures import REFERENCE_SIZES
from comfyui_h3.h3core.media.references import (
    Keyframe,
    MediaRequest,
    Reference,
    ReferenceAudio,
    ReferenceImage,
    ReferenceVideo,
)
from comfyui_h3.h3core.media_request import MAX_AUDIOS, MAX_IMAGES, MAX_MEDIA, MAX_VIDEOS, check_references
from comfyui_h3.h3core.types import Audio
from comfyui_h3.nodes import audio as host_audio
from comfyui_h3.nodes import pictures
from comfyui_h3.nodes import video as host_video
from comfyui_h3.nodes._compat import make
from comfyui_h3.nodes.checks import check_choice, check_short_edge, expect_chain, judge_media, verdict
from comfyui_h3.nodes.encode_media import encode_media
from comfyui_h3.nodes.inputs import fit_input, size_inputs, strict_input
from comfyui_h3.nodes.progress import notice_text, show_text
from comfyui_h3.nodes.types import H3Engine, H3Keyframes, H3Media, H3References

KINDS = (ReferenceImage, ReferenceVideo, ReferenceAudio)
MAX_START_S = 24 * 3600.0
LIMITS = f"Up to {MAX_IMAGES} pictures, {MAX_VIDEOS} videos and {MAX_AUDIOS} sounds, {MAX_MEDIA} together."


def chain_input() -> Any:
    """The references before this one."""
    return H3References.Input("references", optional=True, tooltip=f"From another H3 Reference node. {LIMITS}")


def chain_output() -> Any:
    """The references up to this one. Its id is not that of the input: older hosts forbid that."""
    return H3References.Output(
        "all_references",
        display_name="references",
        tooltip="For H3 Encode Ref Media or the next H3 Reference node.",
    )


def added(references: object, reference: Reference, text: str) -> io.NodeOutput:
    """The chain with one more link; the node says what it added. Raises RequestError when there are too many."""
    chain = (*expect_chain(references, KINDS, "H3 Reference"), reference)
    check_references(chain, complete=False)
    show_text("\n".join(filter(None, (text, notice_text(reference.notices)))))
    return io.NodeOutput(chain)


class H3ReferenceImage(io.ComfyNode):
    """A subject, a style or a scene."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="H3ReferenceImage",
            display_name="H3 Reference Image",
            category="MiniMax H3",
            description=f"Adds a picture to take a subject, a style or a scene from. {LIMITS} The n-th picture of the "
            "chain is <Picture n> in the prompt.",
            search_aliases=["minimax", "hailuo", "h3", "ref2va", "reference", "subject"],
            inputs=[
                io.Image.Input("image", tooltip="One picture, 1:4 to 4:1; of a batch, the first."),
                io.Combo.Input(
                    "size",
                    options=list(REFERENCE_SIZES),
                    default="diffusers",
                    tooltip="Size it is encoded at. diffusers: short side 2048 pixels, up or down, as the release does "
                    "(4,096 rows of the sequence and more). max: down to that only. match: down to the area of the "
                    "video, the fastest.",
                ),
                chain_input(),
            ],
            outputs=[chain_output()],
        )

    @classmethod
    def validate_inputs(cls, size=None) -> bool | str:
        return verdict(lambda: check_choice("size", size, REFERENCE_SIZES))

    @classmethod
    def execute(cls, image, size, references=()) -> io.NodeOutput:
        pixels, notices = pictures.from_host(image, "the reference picture")
        height, width = pixels.shape[:2]
        check_ratio(width, height, "the reference picture")
        reference = ReferenceImage(pixels=pixels, size=size, notices=notices)
        return added(references, reference, f"picture, {width}x{height}")


class H3ReferenceVideo(io.ComfyNode):
    """A motion, a camera, or a clip to edit or to go on from."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="H3ReferenceVideo",
            display_name="H3 Reference Video",
            category="MiniMax H3",
            description=f"Adds a clip to take motion, camera or content from, with its sound. {LIMITS} The n-th clip "
            "of the chain is <Video n> in the prompt, its sound counts as an <Audio n>.",
            search_aliases=["minimax", "hailuo", "h3", "ref2va", "reference", "video to video", "edit"],
            inputs=[
                io.Video.Input(
                    "video",
                    tooltip="A clip of any rate, read in a stream; what lies past the length of the new video is not "
                    "used. At least 22 frames at 24 per second.",
                ),
                io.Audio.Input(
                    "audio", optional=True, tooltip="Takes the place of the sound that the clip has; it starts at 0 s."
                ),
                io.Boolean.Input(
                    "sound",
                    default=True,
                    tooltip="Take the clip's own sound, where it has one. An audio that is connected wins.",
                ),
                io.Float.Input(
                    "start_time",
                    default=0.0,
                    min=0.0,
                    max=MAX_START_S,
                    step=0.1,
                    tooltip="Seconds into the clip, for picture and own sound alike; 0 or more.",
                ),
                make(
                    io.Int.Input,
                    "short_edge",
                    default=SHORT_EDGE,
                    min=SIDE_MULTIPLE,
                    max=MAX_SIDE,
                    step=SIDE_MULTIPLE,
                    tooltip="Of the picture, in pixels, less where the area would pass 1344 x 768. 768 is the "
                    "release's; less costs less.",
                    advanced=True,
                ),
                chain_input(),
            ],
            outputs=[chain_output()],
        )

    @classmethod
    def validate_inputs(cls, start_time=None, short_edge=None) -> bool | str:
        return verdict(lambda: check_start(start_time), lambda: check_short_edge(short_edge))

    @classmethod
    def execute(cls, video, sound, start_time, short_edge, audio=None, references=()) -> io.NodeOutput:
        clip = host_video.clip_from_host(video)
        soundtrack: Audio | Literal["own"] | None = "own" if sound else None
        notices: tuple[str, ...] = ()
        if audio is not None:
            soundtrack, notices = host_audio.first_clip(audio, "the audio")
        reference = ReferenceVideo(
            clip=clip, soundtrack=soundtrack, start_s=start_time, short_edge=short_edge, notices=notices
        )
        info = (clip.trimmed(start_time) if start_time else clip).info
        has_sound = audio is not None or (sound and info.has_sound)
        text = f"video, {info.width}x{info.height}, {info.duration_s:.2f} s, {'with' if has_sound else 'no'} sound"
        return added(references, reference, text)


def check_start(start_time: float | None) -> None:
    """Raises RequestError for a time before the clip, or of no number; None is a linked input."""
    if start_time is not None and not 0 <= start_time <= MAX_START_S:
        raise RequestError(f"start_time={start_time} is not possible; use 0 to {MAX_START_S:.0f} seconds")


class H3ReferenceAudio(io.ComfyNode):
    """A voice or a music."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="H3ReferenceAudio",
            display_name="H3 Reference Audio",
            category="MiniMax H3",
            description=f"Adds a voice or a music to take from. {LIMITS} Needs a picture or a video beside it. Sounds "
            "of videos and of this node count together as <Audio n>, in the order of the chain.",
            search_aliases=["minimax", "hailuo", "h3", "ref2va", "reference", "voice", "music"],
            inputs=[
                io.Audio.Input(
                    "audio",
                    tooltip="1 to 8 channels, any rate; of a batch, the first. What lies past the length of the new "
                    "video is not used.",
                ),
                chain_input(),
            ],
            outputs=[chain_output()],
        )

    @classmethod
    def execute(cls, audio, references=()) -> io.NodeOutput:
        clip, notices = host_audio.first_clip(audio, "the reference sound")
        seconds = clip.samples.shape[1] / max(1, clip.sample_rate)
        return added(references, ReferenceAudio(audio=clip, notices=notices), f"sound, {seconds:.2f} s")


class H3EncodeRefMedia(io.ComfyNode):
    """References in the order of their chain; keyframes beside them are seen by the transformer only."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="H3EncodeRefMedia",
            display_name="H3 Encode Ref Media",
            category="MiniMax H3",
            description="Encodes references for one size and length of the video, and shows how the prompt calls each "
            "of them. Needs the ref2va weights.",
            search_aliases=["minimax", "hailuo", "h3", "ref2va", "reference to video", "subject"],
            inputs=[
                H3Engine.Input("engine", tooltip="From Load H3."),
                H3References.Input("references", tooltip=f"From the H3 Reference nodes. {LIMITS}"),
                *size_inputs(),
                H3Keyframes.Input(
                    "keyframes",
                    optional=True,
                    tooltip="Pictures that the video also passes through, from H3 Keyframe. The prompt has no label "
                    "for them; they count among the 12 media.",
                ),
                fit_input(),
                strict_input(),
            ],
            outputs=[H3Media.Output("media", display_name="media", tooltip="For H3 Encode Prompt.")],
        )

    @classmethod
    def validate_inputs(cls, width=None, height=None, frames=None, fit=None) -> bool | str:
        return judge_media(width, height, frames, fit)

    @classmethod
    def execute(cls, engine, references, width, height, frames, fit, keyframes=(), strict=False) -> io.NodeOutput:
        request = MediaRequest(
            width=width,
            height=height,
            num_frames=frames,
            references=expect_chain(references, KINDS, "H3 Reference"),
            keyframes=expect_chain(keyframes, Keyframe, "H3 Keyframe"),
            fit=fit,
            strict=strict,
        )
        return io.NodeOutput(encode_media(engine, request))
