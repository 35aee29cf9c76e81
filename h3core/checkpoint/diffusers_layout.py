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


def rename(name: str, table: Renames) -> str:
    for pattern, replacement in table:
        name = re.sub(pattern, replacement, name)
    return name
