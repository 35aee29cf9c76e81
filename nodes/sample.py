"""H3 Sample DiT: conditioning becomes latents of picture and sound."""

from comfy_api.latest import io

from comfyui_h3.h3core.engine import Engine
from comfyui_h3.h3core.request import DEFAULT_SEED, MAX_SEED, MAX_SIGMA_POINTS
from comfyui_h3.h3core.types import Conditioning
from comfyui_h3.nodes._compat import make
from comfyui_h3.nodes.checks import expect, judge_sampling
from comfyui_h3.nodes.memory import make_room
from comfyui_h3.nodes.progress import HostProgress, LoadProgress
from comfyui_h3.nodes.types import H3Conditioning, H3Engine, H3Latents


class H3SampleDiT(io.ComfyNode):
    """One packed sequence holds both: picture and sound are made for each other."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="H3SampleDiT",
            display_name="H3 Sample DiT",
            category="MiniMax H3",
            description="Denoises the latents of picture and sound together, in one packed sequence.",
            search_aliases=["minimax", "hailuo", "h3", "t2va", "sampler", "denoise"],
            inputs=[
                H3Engine.Input("engine", tooltip="From Load H3."),
                H3Conditioning.Input("conditioning", tooltip="From H3 Encode Prompt."),
                io.Int.Input(
                    "seed",
                    default=DEFAULT_SEED,
                    min=0,
                    max=MAX_SEED,
                    control_after_generate=True,
                    tooltip="Of the initial noise, 0 to 2^63 - 1. The same seed gives the same video; seeds that are "
                    "2^32 apart give the same noise, as in the reference.",
                ),
                io.Int.Input(
                    "sigma_points",
                    default=50,
                    min=2,
                    max=MAX_SIGMA_POINTS,
                    tooltip=f"Points of the noise schedule, 2 to {MAX_SIGMA_POINTS}: one more than forwards of the "
                    "transformer. The release uses 50 (49 forwards).",
                ),
            ],
            outputs=[H3Latents.Output("latents", display_name="latents", tooltip="For the two H3 Decode nodes.")],
        )

    @classmethod
    def validate_inputs(cls, seed=None, sigma_points=None) -> bool | str:
        return judge_sampling(seed, sigma_points)

    @classmethod
    def execute(cls, engine, conditioning, seed, sigma_points) -> io.NodeOutput:
        engine = expect(engine, Engine, "Load H3")
        conditioning = expect(conditioning, Conditioning, "H3 Encode Prompt")
        make_room(engine, "sample", conditioning)
        on_load, on_step = LoadProgress("the transformer"), HostProgress("Sampling")
        latents = engine.sample(conditioning, seed=seed, sigma_points=sigma_points, on_step=on_step, on_load=on_load)
        return io.NodeOutput(latents)
