"""The encoder itself: transformers' Qwen3-VL, cut after the tapped layer, without its final norm."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from comfyui_h3.h3core.models.text_encoder.config import VISION_ROPE_THETA, TextEncoderConfig
from comfyui_h3.h3core.models.text_encoder.template import Presentation
from comfyui_h3.h3core.models.text_encoder.vision import VisualPatches, position_ids


class TextEncoder(nn.Module):
    """Presentation -> (L, hidden_size): the residual stream after ``config.tap`` layers, one row a token.

    Parameters are named as in the official file without its leading ``model.``.
    """

    def __init__(self, config: TextEncoderConfig):
        super().__init__()
        from transformers import Qwen3VLConfig, Qwen3VLModel

        values = copy.deepcopy(dict(config.hf_config))
        values["text_config"]["num_hidden_layers"] = config.tap
        hf_config = Qwen3VLConfig.from_dict(values)
        hf_config._attn_implementation = "sdpa"
        model = Qwen3VLModel(hf_config)
        self.config = config
        self.language_model = model.language_model
        self.visual = model.visual
        self.language_model.norm = nn.Identity()  # the tapped states are not normalised
        self._model = [model]  # in a list: its submodules are registered above, under the names of the file

    def reset_rotary_frequencies(self, device: torch.device) -> None:
        """Fills the tables that no file holds; float32 whatever the dtype of the weights, bfloat16 is too coarse."""
        for name, module in self.named_modules():
            if not hasattr(module, "inv_freq"):
                continue
            theta = VISION_ROPE_THETA if name.startswith("visual.") else self.config.rope_theta
            num = module.inv_freq.shape[0]
            exponent = torch.arange(0, 2 * num, 2, dtype=torch.float32, device="cpu") / (2 * num)
            inv_freq = (1.0 / theta**exponent).to(device)
            for buffer in ("inv_freq", "original_inv_freq"):
                if hasattr(module, buffer):
                    module.register_buffer(buffer, inv_freq.clone(), persistent=False)

    def forward(self, presentation: Presentation) -> Tensor:
        embedding = self.language_model.embed_tokens.weight
        device, dtype = embedding.device, embedding.dtype
        media = {}
        if presentation.images:
            media["pixel_values"], media["image_grid_thw"] = _stack(presentation.images, device, dtype)
        if presentation.videos:
            media["pixel_values_videos"], media["video_grid_thw"] = _stack(presentation.videos, device, dtype)
        ids = presentation.ids.to(device)
        # Vision start and end are text to the encoder's clock; only pad rows stand for pixels.
        pads = torch.tensor([self._model[0].config.image_token_id, self._model[0].config.video_token_id], device=device)
        positions = position_ids(list(presentation.blocks), torch.isin(ids, pads).cpu(), self.config.merge_size)
        return self._model[0](
            input_ids=ids[None],
            attention_mask=torch.ones_like(ids)[None],
            position_ids=positions[:, None].to(device),
            use_cache=False,
            **media,
        ).last_hidden_state[0]


def _stack(items: tuple[VisualPatches, ...], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    patches = torch.cat([item.patches for item in items]).to(device, dtype)
    return patches, torch.tensor([item.grid for item in items], device=device)
