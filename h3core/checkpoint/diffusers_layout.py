"""Official tensors under the names, and in the row order, of diffusers' H3 classes.

Tables of (pattern, replacement), applied in order to the whole name; row orders are in the code below them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

Renames = tuple[tuple[str, str], ...]

DIT_NAMES: Renames = (
    (r"^video_patch_proj\.", "proj_in."),
    (r"^audio_patch_proj\.", "audio_proj_in."),
    (r"^condition_proj\.", "context_embedder."),
    (r"^time_embedder\.proj_in\.", "time_embedder.linear_1."),
    (r"^time_embedder\.proj_out\.", "time_embedder.linear_2."),
    (r"^token_refiner\.blocks\.", "token_refiner.refiner_blocks."),
    (r"^blocks\.", "transformer_blocks."),
    (r"\.attn\.q_norm\.", ".attn.norm_q."),
    (r"\.attn\.k_norm\.", ".attn.norm_k."),
    (r"\.attn\.out_proj\.", ".attn.to_out.0."),
    (r"\.mlp\.fc1\.", ".ff.net.0.proj."),
    (r"\.mlp\.fc2\.", ".ff.net.2."),
    (r"^final_layer\.norm\.", "norm_out.norm."),
    (r"^final_layer\.adaln_proj\.linear\.", "norm_out.linear."),
    (r"^final_layer\.video_out\.", "proj_out."),
    (r"^final_layer\.audio_out\.", "audio_proj_out."),
)

VIDEO_VAE_NAMES: Renames = (
    (r"^encoder\.down\.(\d+)\.block\.(\d+)\.", r"encoder.down_blocks.\1.resnets.\2."),
    (r"\.nin_shortcut\.", ".conv_shortcut."),
    (r"^encoder\.down\.(\d+)\.downsample\.", r"encoder.down_blocks.\1.downsamplers.0."),
    (r"^decoder\.x_embedder\.", "decoder.proj_in."),
    (r"\.attn\.to_out\.", ".attn.to_out.0."),
    (r"\.ff\.w1\.", ".ff.net.0.proj."),
    (r"\.ff\.w2\.", ".ff.net.2."),
)

AUDIO_VAE_NAMES: Renames = (
    (r"\.parametrizations\.weight\.original0$", ".weight_g"),
    (r"\.parametrizations\.weight\.original1$", ".weight_v"),
)


def dit_to_diffusers(tensors: Mapping[str, Tensor], num_heads: int, head_dim: int) -> dict[str, Tensor]:
    """Official tensors (qkv interleaved per head, [gate | up]) -> the state dict of ``MiniMaxH3Transformer3DModel``.

    q, k and v become tensors of their own, the halves of fc1 change places; ``rope.inv_freq`` is recomputed there.
    """
    out = {}
    for name, tensor in tensors.items():
        target = rename(name, DIT_NAMES)
        if name == "rope.inv_freq":
            continue
        if name.endswith(".attn.qkv_proj.weight"):
            rows = tensor.unflatten(0, (num_heads, 3, head_dim))
            for i, part in enumerate("qkv"):
                out[target.replace("qkv_proj", f"to_{part}")] = rows[:, i].flatten(0, 1)
        elif name.endswith(".mlp.fc1.weight"):
            out[target] = torch.cat(tensor.chunk(2)[::-1])
        else:
            out[target] = tensor
    return out


def video_vae_to_diffusers(tensors: Mapping[str, Tensor], num_heads: int, head_dim: int) -> dict[str, Tensor]:
    """Official tensors of the video VAE (both halves or one) -> the state dict of ``AutoencoderKLMiniMaxH3``.

    The decoder's qkv rows are interleaved per head, w1 is [gate | value]; ``decoder.mask_token`` does not exist there.
    """
    out = {}
    for name, tensor in tensors.items():
        target = rename(name, VIDEO_VAE_NAMES)
        if name == "decoder.mask_token":
            continue
        if ".attn.to_qkv." in name:
            rows = tensor.unflatten(0, (num_heads, 3, head_dim))
            for i, part in enumerate("qkv"):
                out[target.replace("to_qkv", f"to_{part}")] = rows[:, i].flatten(0, 1)
        elif ".ff.w1." in name:
            out[target] = torch.cat(tensor.chunk(2)[::-1])
        else:
            out[target] = tensor
    return out


def audio_vae_to_diffusers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Official tensors of the audio VAE (not folded) -> the state dict of ``AutoencoderKLMiniMaxH3Audio``."""
    return {rename(name, AUDIO_VAE_NAMES): tensor for name, tensor in tensors.items()}


def rename(name: str, table: Renames) -> str:
    for pattern, replacement in table:
        name = re.sub(pattern, replacement, name)
    return name
