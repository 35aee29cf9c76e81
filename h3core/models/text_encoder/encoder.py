"""The encoder itself: transformers' Qwen3-VL, cut after the tapped layer, without its final norm."""

from __future__ import annotations

import copy
import re

import torch
from torch import Tensor, nn

from comfyui_h3.h3core.errors import H3Error
from comfyui_h3.h3core.models.text_encoder.config import VISION_ROPE_THETA, TextEncoderConfig
from comfyui_h3.h3core.models.text_encoder.template import Presentation
from comfyui_h3.h3core.models.text_encoder.vision import VisualPatches, position_ids
from comfyui_h3.h3core.types import Progress


class TextEncoder(nn.Module):
    """Presentation -> (L, hidden_size): the residual stream after ``config.tap`` layers, one row a token.

    Parameters carry the official names; of what the file holds, the layers behind the tap, the final norm and the
    language head are not here. The linears that match ``FP8`` can be in 8 bits.
    """

    FP8 = re.compile(r"model\.language_model\.layers\.\d+\.(self_attn\.[qkvo]|mlp\.(gate|up|down))_proj")

    def __init__(self, config: TextEncoderConfig):
        super().__init__()
        try:
            from transformers import Qwen3VLConfig, Qwen3VLModel
        except ImportError as error:
            raise H3Error(
                f"this transformers has no Qwen3-VL, the text encoder of H3 ({error}); update it to 4.57 or newer"
            ) from error

        values = copy.deepcopy(dict(config.hf_config))
        values["text_config"]["num_hidden_layers"] = config.tap
        hf_config = Qwen3VLConfig.from_dict(values)
        hf_config._attn_implementation = "sdpa"
        self.config = config
        self.model = Qwen3VLModel(hf_config)
        self.model.language_model.norm = nn.Identity()  # the tapped states are not normalised

    def reset_rotary_frequencies(self, device: torch.device) -> None:
        """Fills the tables that no file holds; float32 whatever the dtype of the weights, bfloat16 is too coarse."""
        for name, module in self.named_modules():
            if not hasattr(module, "inv_freq"):
                continue
            theta = VISION_ROPE_THETA if name.startswith("model.visual.") else self.config.rope_theta
            num = module.inv_freq.shape[0]
            exponent = torch.arange(0, 2 * num, 2, dtype=torch.float32, device="cpu") / (2 * num)
            inv_freq = (1.0 / theta**exponent).to(device)
            module.inv_freq = inv_freq
            if hasattr(module, "original_inv_freq"):  # a buffer, or in transformers 4 a plain attribute
                module.original_inv_freq = inv_freq.clone()

    def forward(self, presentation: Presentation, on_layer: Progress | None = None) -> Tensor:
        """``on_layer(done, total)`` runs before each layer, and at the end; what it raises ends the forward."""
        layers = self.model.language_model.layers
        total = len(layers)
        # Hooks for the time of this call: transformers has no callback, and a long prompt takes a while.
        hooks = [
            layer.register_forward_pre_hook(lambda *_, done=done: on_layer(done, total))
            for done, layer in enumerate(layers)
            if on_layer is not None
        ]
        try:
            states = self._states(presentation)
        finally:
            for hook in hooks:
                hook.remove()
        if on_layer is not None:
            on_layer(total, total)
        return states

    def _states(self, presentation: Presentation) -> Tensor:
        embedding = self.model.language_model.embed_tokens.weight
        device, dtype = embedding.device, embedding.dtype
        media = {}
        if presentation.images:
            media["pixel_values"], media["image_grid_thw"] = _stack(presentation.images, device, dtype)
        if presentation.videos:
            media["pixel_values_videos"], media["video_grid_thw"] = _stack(presentation.videos, device, dtype)
        ids = presentation.ids.to(device)
        # Vision start and end are text to the encoder's clock; only pad rows stand for pixels.
        pads = torch.tensor([self.model.config.image_token_id, self.model.config.video_token_id], device=device)
        positions = position_ids(list(presentation.blocks), torch.isin(ids, pads).cpu(), self.config.merge_size)
        return self.model(
            input_ids=ids[None],
            attention_mask=torch.ones_like(ids)[None],
            position_ids=positions[:, None].to(device),
            use_cache=False,
            **media,
        ).last_hidden_state[0]


def _stack(items: tuple[VisualPatches, ...], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    patches = torch.cat([item.patches for item in items]).to(device, dtype)
    return patches, torch.tensor([item.grid for item in items], device=device)
