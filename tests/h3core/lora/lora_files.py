"""Writes LoRAs in the forms that trainers and hosts use, and the change that each must make.

Factors are made in the engine's row order ([q | k | v], [gate | up]); a writer turns them into its family's.
"""

from dataclasses import dataclass, field

import torch
from safetensors.torch import save_file

RANK = 4
HEADS, HEAD_DIM = 56, 32  # of the tiny transformer

# module of the engine -> (out, in, name in diffusers' MiniMaxH3Transformer3DModel); sizes of the tiny transformer
MODULES = {
    "blocks.0.attn.qkv_proj": (5376, 64, "transformer_blocks.0.attn.to_{}"),
    "blocks.1.attn.out_proj": (64, 1792, "transformer_blocks.1.attn.to_out.0"),
    "blocks.2.mlp.fc1": (192, 64, "transformer_blocks.2.ff.net.0.proj"),
    "blocks.3.mlp.fc2": (64, 96, "transformer_blocks.3.ff.net.2"),
    "blocks.1.adaln_proj.linear": (1152, 40, "transformer_blocks.1.adaln_proj.linear"),
    "token_refiner.blocks.1.attn.qkv_proj": (5376, 64, "token_refiner.refiner_blocks.1.attn.to_{}"),
    "token_refiner.blocks.0.mlp.fc1": (192, 64, "token_refiner.refiner_blocks.0.ff.net.0.proj"),
    "video_patch_proj": (64, 96, "proj_in"),
    "audio_patch_proj": (64, 32, "audio_proj_in"),
    "condition_proj": (64, 128, "context_embedder"),
    "time_embedder.proj_in": (64, 32, "time_embedder.linear_1"),
    "time_embedder.proj_out": (40, 64, "time_embedder.linear_2"),
    "final_layer.adaln_proj.linear": (128, 40, "norm_out.linear"),
    "final_layer.video_out": (96, 64, "proj_out"),
    "final_layer.audio_out": (32, 64, "audio_proj_out"),
}


@dataclass
class Lora:
    """tensors, metadata: of the file. deltas: parameter -> what it gains at strength 1, float64."""

    tensors: dict = field(default_factory=dict)
    metadata: dict = field(default_factory=dict)
    deltas: dict = field(default_factory=dict)

    def save(self, path):
        tensors = {key: tensor.contiguous() for key, tensor in self.tensors.items()}
        save_file(tensors, path, metadata=self.metadata or None)
        return path


def make_factors(seed, modules=MODULES, scale=0.1):
    """module -> (B, A) float32, in the engine's row order."""
    g = torch.Generator().manual_seed(seed)
    return {
        module: (scale * torch.randn(rows, RANK, generator=g), scale * torch.randn(RANK, columns, generator=g))
        for module, (rows, columns, _) in modules.items()
    }


def product(factors, scale=1.0):
    up, down = factors
    return scale * (up.double() @ down.double())


def interleave(rows, num_heads=HEADS, head_dim=HEAD_DIM):
    """[q | k | v] -> q, k and v of the first head, of the second, ..."""
    parts = [part.split(head_dim) for part in rows.split(num_heads * head_dim)]
    return torch.cat([parts[i][head] for head in range(num_heads) for i in range(3)])


def native(factors, names=("lora_A.weight", "lora_B.weight"), prefix="", alpha=None):
    """Under the release's names: LarryVrh's, and with a prefix ComfyUI's."""
    lora = Lora()
    for module, (up, down) in factors.items():
        lora.tensors |= {f"{prefix}{module}.{names[0]}": down, f"{prefix}{module}.{names[1]}": up}
        if alpha is not None:
            lora.tensors[f"{prefix}{module}.alpha"] = torch.tensor(float(alpha))
        lora.deltas[f"{module}.weight"] = product((up, down), 1 if alpha is None else alpha / RANK)
    return lora


def comfyui(factors, alpha=8):
    return native(factors, ("lora_down.weight", "lora_up.weight"), "diffusion_model.", alpha)


def kohya(factors, alpha=2):
    lora = native(factors, ("lora_down.weight", "lora_up.weight"), "", alpha)
    flat = {}
    for key, tensor in lora.tensors.items():
        module = max((m for m in factors if key.startswith(f"{m}.")), key=len)
        flat[f"lora_unet_{module.replace('.', '_')}{key.removeprefix(module)}"] = tensor
    lora.tensors = flat
    return lora


def diffsynth(factors):
    """The release's names and row order, behind PEFT's infix."""
    lora = native(factors, ("lora_A.default.weight", "lora_B.default.weight"))
    for key in lora.tensors:
        if key.endswith(".attn.qkv_proj.lora_B.default.weight"):
            lora.tensors[key] = interleave(lora.tensors[key])
    return lora


def diffusers(factors, prefix="transformer.", infix="", alpha=None):
    """q, k and v apart, fc1 as [up | gate]."""
    lora = Lora(metadata={} if alpha is None else {"alpha": str(alpha)})
    for module, (up, down) in factors.items():
        name = MODULES[module][2]
        pairs = {name: up}
        if name.endswith("to_{}"):
            pairs = {name.format(letter): part for letter, part in zip("qkv", up.chunk(3), strict=True)}
        elif name.endswith(".ff.net.0.proj"):
            gate, value = up.chunk(2)
            pairs = {name: torch.cat([value, gate])}
        for name, rows in pairs.items():
            lora.tensors |= {
                f"{prefix}{name}.lora_A{infix}.weight": down.clone(),
                f"{prefix}{name}.lora_B{infix}.weight": rows.clone(),
            }
        lora.deltas[f"{module}.weight"] = product((up, down), 1 if alpha is None else alpha / RANK)
    return lora


FAMILIES = {
    "official": native,
    "comfyui": comfyui,
    "kohya": kohya,
    "diffsynth": diffsynth,
    "diffusers": diffusers,
    "peft": lambda factors: diffusers(factors, "base_model.model.", ".default", alpha=16),
    "no prefix": lambda factors: diffusers(factors, "", ".default", alpha=1),
}
