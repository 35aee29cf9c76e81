"""H3 Decode Video: latents become a VIDEO of the host."""

from comfy_api.latest import io

from comfyui_h3.h3core.engine import Engine
from comfyui_h3.h3core.types import Latents
from comfyui_h3.nodes import audio as host_audio
from comfyui_h3.nodes._compat import make
from comfyui_h3.nodes.checks import expect
from comfyui_h3.nodes.memory import make_room
from comfyui_h3.nodes.progress import HostProgress, LoadProgress
from comfyui_h3.nodes.types import H3Engine, H3Latents
from comfyui_h3.nodes.video import H3Video


class H3DecodeVideo(io.ComfyNode):
    """One output: a host caches by inputs, so an IMAGE output made only when linked would be cached as missing."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="H3DecodeVideo",
            display_name="H3 Decode Video",
            category="MiniMax H3",
            description="Decodes the picture at 24 frames per second. Get Video Components makes IMAGE from its VIDEO.",
            search_aliases=["minimax", "hailuo", "h3", "vae decode", "video"],
            inputs=[
                H3Engine.Input("engine", tooltip="From Load H3."),
                H3Latents.Input("latents", tooltip="From H3 Sample DiT."),
                io.Audio.Input(
                    "audio",
                    optional=True,
                    tooltip="Sound of the video, mono or stereo, as from H3 Decode Audio. Without it: silent.",
                ),
            ],
            outputs=[io.Video.Output("video", display_name="video", tooltip="8-bit frames at 24 per second.")],
        )

    @classmethod
    def execute(cls, engine, latents, audio=None) -> io.NodeOutput:
        engine = expect(engine, Engine, "Load H3")
        latents = expect(latents, Latents, "H3 Sample DiT")
        sound = None if audio is None else host_audio.from_host(audio)
        make_room(engine, "decode_video", latents)
        on_load, on_progress = LoadProgress("the video decoder"), HostProgress("Decoding video")
        frames = engine.decode_video(latents, on_progress=on_progress, on_load=on_load)
        return io.NodeOutput(H3Video(frames, sound))
