"""H3 Decode Audio: latents become an AUDIO of the host."""

from comfy_api.latest import io

from comfyui_h3.h3core.engine import Engine
from comfyui_h3.h3core.types import Latents
from comfyui_h3.nodes._compat import make
from comfyui_h3.nodes.audio import H3Audio
from comfyui_h3.nodes.checks import expect
from comfyui_h3.nodes.memory import make_room
from comfyui_h3.nodes.progress import HostProgress, LoadProgress
from comfyui_h3.nodes.types import H3Engine, H3Latents


class H3DecodeAudio(io.ComfyNode):
    """The level is the model's own: no loudness normalisation, unlike the host's own audio decoding."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="H3DecodeAudio",
            display_name="H3 Decode Audio",
            category="MiniMax H3",
            description="Decodes the sound: 32 kHz stereo at the level the model made, without normalisation.",
            search_aliases=["minimax", "hailuo", "h3", "vae decode", "sound"],
            inputs=[
                H3Engine.Input("engine", tooltip="From Load H3."),
                H3Latents.Input("latents", tooltip="From H3 Sample DiT."),
            ],
            outputs=[io.Audio.Output("audio", display_name="audio", tooltip="Stereo samples at 32 kHz.")],
        )

    @classmethod
    def execute(cls, engine, latents) -> io.NodeOutput:
        engine = expect(engine, Engine, "Load H3")
        latents = expect(latents, Latents, "H3 Sample DiT")
        make_room(engine, "decode_audio", latents)
        on_load, on_progress = LoadProgress("the audio decoder"), HostProgress("Decoding audio")
        on_progress(0, 1)  # one piece of work; this is where Cancel is seen
        audio = engine.decode_audio(latents, on_load=on_load)
        on_progress(1, 1)
        return io.NodeOutput(H3Audio(audio))
