"""The nodes: thin adapters between a ComfyUI host and the engine. Importing this package needs the host."""

from comfy_api.latest import ComfyExtension, io

from comfyui_h3.nodes.decode_audio import H3DecodeAudio
from comfyui_h3.nodes.decode_video import H3DecodeVideo
from comfyui_h3.nodes.encode_prompt import H3EncodePrompt
from comfyui_h3.nodes.load import H3LoadModel
from comfyui_h3.nodes.sample import H3SampleDiT
from comfyui_h3.nodes.save_mp4 import H3SaveMP4


class H3Extension(ComfyExtension):
    """What the pack adds to a host."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [H3LoadModel, H3EncodePrompt, H3SampleDiT, H3DecodeVideo, H3DecodeAudio, H3SaveMP4]
