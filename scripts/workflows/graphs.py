"""The example workflows. Columns from left to right: sources, media, prompt, sampling, decoding, file."""

from __future__ import annotations

from typing import Any

from comfyui_h3.scripts.make_media import CLIP, FIRST_FRAME, LAST_FRAME, PICTURE, VOICE
from comfyui_h3.scripts.workflows import texts
from comfyui_h3.scripts.workflows.forms import Link, Node

ENGINE = Link(node="load")
CANVAS = {
    "width": Link(node="canvas", output=0, widget=1344),
    "height": Link(node="canvas", output=1, widget=768),
    "frames": Link(node="canvas", output=2, widget=124),
}
SIZE = {"width": 1344, "height": 768, "frames": 124}
COLUMN = 60  # pixels between two columns


def t2va() -> dict[str, Node]:
    return {
        "note": note("Text to video", texts.T2VA_NOTE, (0, 330), 320),
        "load": load(),
        "encode": encode(texts.T2VA_PROMPT, SIZE, x=460),
        **from_sampler(x=1000),
    }


def first_frame() -> dict[str, Node]:
    first = Link(node="first")
    return {
        "note": note("First frame to video", texts.FIRST_FRAME_NOTE, (0, 330), 320),
        "load": load(),
        "first": load_image(FIRST_FRAME, "First frame", (0, 710)),
        "canvas": canvas("auto", (460, 0), image=first),
        "media": media("H3EncodeFLMedia", {**CANVAS, "first_frame": first, "fit": "release", "strict": False}, 860),
        "encode": encode(texts.FIRST_FRAME_PROMPT, CANVAS, x=1260, media=Link(node="media")),
        **from_sampler(x=1800),
    }


def fl2va() -> dict[str, Node]:
    first, last = Link(node="first"), Link(node="last")
    pictures = {"first_frame": first, "last_frame": last, "fit": "release", "strict": False}
    return {
        "note": note("First and last frame to video", texts.FL2VA_NOTE, (0, 330), 320),
        "load": load(),
        "first": load_image(FIRST_FRAME, "First frame", (0, 710)),
        "last": load_image(LAST_FRAME, "Last frame", (0, 1110)),
        "canvas": canvas("auto", (460, 0), image=first),
        "media": media("H3EncodeFLMedia", {**CANVAS, **pictures}, 860),
        "encode": encode(texts.FL2VA_PROMPT, CANVAS, x=1260, media=Link(node="media")),
        **from_sampler(x=1800),
    }


def ref2va() -> dict[str, Node]:
    chain = Link(node="audio_reference")
    return {
        "note": note("References to video", texts.REF2VA_NOTE, (0, 330), 420),
        "load": load(),
        **reference_sources(y=810),
        **reference_chain(x=460, y=730),
        "canvas": canvas("16:9", (460, 0)),
        "media": media("H3EncodeRefMedia", {"references": chain, **CANVAS, "fit": "release", "strict": False}, 860),
        "encode": encode(texts.REF2VA_PROMPT, CANVAS, x=1260, media=Link(node="media")),
        **from_sampler(x=1800),
    }


WORKFLOWS = {"t2va": t2va, "first_frame": first_frame, "fl2va": fl2va, "ref2va": ref2va}


def note(title: str, text: str, place: tuple[int, int], height: int) -> Node:
    return Node(type="MarkdownNote", title=title, inputs={"text": text}, place=place, size=(400, height))


def load() -> Node:
    return Node(
        type="H3LoadModel",
        title="Load H3",
        inputs={"model": "tiny-h3", "weights": "auto", "device": "auto", "precision": "auto", "attention": "auto"},
        outputs=(("engine", "H3_ENGINE"),),
        place=(0, 0),
        size=(400, 270),
    )


def load_image(name: str, title: str, place: tuple[int, int]) -> Node:
    return Node(
        type="LoadImage",
        title=title,
        inputs={"image": name},
        outputs=(("IMAGE", "IMAGE"), ("MASK", "MASK")),
        after_widget={"image": "image"},
        place=place,
        size=(400, 340),
    )


def reference_sources(y: int) -> dict[str, Node]:
    """The files of the references, below each other from ``y`` on."""
    return {
        "picture": load_image(PICTURE, "Load Image", (0, y)),
        "clip": Node(
            type="LoadVideo",
            title="Load Video",
            inputs={"file": CLIP},
            outputs=(("VIDEO", "VIDEO"),),
            after_widget={"file": "image"},
            place=(0, y + 400),
            size=(400, 340),
        ),
        "voice": Node(
            type="LoadAudio",
            title="Load Audio",
            inputs={"audio": VOICE},
            outputs=(("AUDIO", "AUDIO"),),
            place=(0, y + 800),
            size=(400, 140),
        ),
    }


def reference_chain(x: int, y: int) -> dict[str, Node]:
    """A picture, then a video, then a sound, below each other from ``y`` on."""
    chain = "references", "H3_REFERENCES"
    return {
        "image_reference": Node(
            type="H3ReferenceImage",
            title="H3 Reference Image",
            inputs={"image": Link(node="picture"), "size": "diffusers"},
            outputs=(chain,),
            place=(x, y),
            size=(340, 130),
        ),
        "video_reference": Node(
            type="H3ReferenceVideo",
            title="H3 Reference Video",
            inputs={
                "video": Link(node="clip"),
                "sound": True,
                "start_time": 0.0,
                "short_edge": 768,
                "references": Link(node="image_reference"),
            },
            outputs=(chain,),
            place=(x, y + 190),
            size=(340, 220),
        ),
        "audio_reference": Node(
            type="H3ReferenceAudio",
            title="H3 Reference Audio",
            inputs={"audio": Link(node="voice"), "references": Link(node="video_reference")},
            outputs=(chain,),
            place=(x, y + 470),
            size=(340, 110),
        ),
    }


def canvas(aspect: str, place: tuple[int, int], **sockets: Link) -> Node:
    return Node(
        type="H3Canvas",
        title="H3 Canvas",
        inputs={"aspect": aspect, "short_edge": 768, "duration": 5.0, **sockets},
        outputs=(("width", "INT"), ("height", "INT"), ("frames", "INT"), ("summary", "STRING")),
        place=place,
        size=(340, 330),
    )


def media(kind: str, inputs: dict[str, Any], x: int) -> Node:
    title = {"H3EncodeFLMedia": "H3 Encode FL Media", "H3EncodeRefMedia": "H3 Encode Ref Media"}[kind]
    return Node(
        type=kind,
        title=title,
        inputs={"engine": ENGINE, **inputs},
        outputs=(("media", "H3_MEDIA"),),
        place=(x, 480),
        size=(340, 340),
    )


def encode(prompt: str, size: dict[str, Any], x: int, **sockets: Link) -> Node:
    return Node(
        type="H3EncodePrompt",
        title="H3 Encode Prompt",
        inputs={"engine": ENGINE, "prompt": prompt, **size, **sockets, "strict": False},
        outputs=(("conditioning", "H3_CONDITIONING"),),
        place=(x, 0),
        size=(480, 800),
    )


def from_sampler(x: int) -> dict[str, Node]:
    """The nodes that all workflows end with, from ``x`` on."""
    latents = Link(node="sample")
    return {
        "sample": Node(
            type="H3SampleDiT",
            title="H3 Sample DiT",
            inputs={"engine": ENGINE, "conditioning": Link(node="encode"), "seed": 42, "sigma_points": 50},
            outputs=(("latents", "H3_LATENTS"),),
            after_widget={"seed": "fixed"},
            place=(x, 0),
            size=(340, 190),
        ),
        "decode_audio": Node(
            type="H3DecodeAudio",
            title="H3 Decode Audio",
            inputs={"engine": ENGINE, "latents": latents},
            outputs=(("audio", "AUDIO"),),
            place=(x + 340 + COLUMN, 0),
            size=(340, 110),
        ),
        "decode_video": Node(
            type="H3DecodeVideo",
            title="H3 Decode Video",
            inputs={"engine": ENGINE, "latents": latents, "audio": Link(node="decode_audio")},
            outputs=(("video", "VIDEO"),),
            place=(x + 340 + COLUMN, 170),
            size=(340, 130),
        ),
        "save": Node(
            type="H3SaveMP4",
            title="H3 Save MP4",
            inputs={
                "video": Link(node="decode_video"),
                "filename_prefix": "video/H3",
                "crf": 18,
                "preset": "fast",
                "save_metadata": True,
            },
            place=(x + 2 * (340 + COLUMN), 0),
            size=(440, 570),
        ),
    }
