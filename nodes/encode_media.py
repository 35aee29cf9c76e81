"""What the two media nodes have in common: they run the same stage and show what came of it."""

from comfyui_h3.h3core.engine import Engine
from comfyui_h3.h3core.media.references import MediaRequest
from comfyui_h3.h3core.types import EncodedMedia
from comfyui_h3.nodes.checks import expect
from comfyui_h3.nodes.memory import make_room
from comfyui_h3.nodes.progress import HostProgress, LoadProgress, notice_text, show_text


def encode_media(engine: object, request: MediaRequest) -> EncodedMedia:
    """The media, encoded; the node then says how a prompt calls them, and what is unusual about them."""
    engine = expect(engine, Engine, "Load H3")
    make_room(engine, "encode_media")
    on_load = LoadProgress("the media encoders")
    media = engine.encode_media(request, on_medium=lambda name: HostProgress(name, waiting_for=None), on_load=on_load)
    show_text("\n".join(filter(None, (", ".join(labels(media)), notice_text(media.notices)))))
    return media


def labels(media: EncodedMedia) -> list[str]:
    """What a prompt calls each medium that the text encoder sees, in their order. Soundtracks count as sounds."""
    texts = []
    for medium, names in zip(media.presented, media.labels, strict=True):
        *sound, own = names
        text = f"<{own}>" + "".join(f" with <{name}>" for name in sound)
        texts.append(f"{text} at frame {medium.condition.frame}" if medium.condition.kind == "keyframe" else text)
    return texts
