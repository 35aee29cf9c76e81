"""The nodes: thin adapters between a ComfyUI host and the engine. Importing this package needs the host."""

from comfy_api.latest import ComfyExtension, io

from comfyui_h3.nodes.canvas import H3Canvas
from comfyui_h3.nodes.component import H3Component
from comfyui_h3.nodes.decode_audio import H3DecodeAudio
from comfyui_h3.nodes.decode_video import H3DecodeVideo
from comfyui_h3.nodes.encode_fl_media import H3EncodeFLMedia, H3Keyframe
from comfyui_h3.nodes.encode_prompt import H3EncodePrompt
from comfyui_h3.nodes.load import H3LoadModel
from comfyui_h3.nodes.lora import H3LoRA
from comfyui_h3.nodes.prompt_builder import H3PromptBuilder
from comfyui_h3.nodes.prompt_checker import H3PromptChecker
from comfyui_h3.nodes.references import H3EncodeRefMedia, H3ReferenceAudio, H3ReferenceImage, H3ReferenceVideo
from comfyui_h3.nodes.sample import H3SampleDiT
from comfyui_h3.nodes.save_mp4 import H3SaveMP4


class H3Extension(ComfyExtension):
    """What the pack adds to a host."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            H3LoadModel,
            H3LoRA,
            H3Canvas,
            H3PromptBuilder,
            H3PromptChecker,
            H3Keyframe,
            H3EncodeFLMedia,
            H3ReferenceImage,
            H3ReferenceVideo,
            H3ReferenceAudio,
            H3EncodeRefMedia,
            H3EncodePrompt,
            H3SampleDiT,
            H3DecodeVideo,
            H3DecodeAudio,
            H3SaveMP4,
            H3Component,
        ]
