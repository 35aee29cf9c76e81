"""Mean and deviation of latents that single files of VAEs carry: they have to be those of the checkpoint's config."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from comfyui_h3.h3core.checkpoint.index import read_entries
from comfyui_h3.h3core.errors import CheckpointError
from comfyui_h3.h3core.models.audio_vae.config import AudioVAEConfig
from comfyui_h3.h3core.models.video_vae.config import VideoVAEConfig

NAMES = ("latents_mean", "latents_std")


def check_latent_statistics(path: Path, config: VideoVAEConfig | AudioVAEConfig) -> None:
    """Raises CheckpointError for a file whose statistics are others: its latents would not be this transformer's."""
    for name, entry in read_entries(path, lambda key: key in NAMES).items():
        wanted = torch.tensor(getattr(config, name))
        try:
            with safe_open(entry.file, framework="pt", device="cpu") as tensors:
                found = tensors.get_tensor(name).float().flatten()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{entry.file} cannot be read ({error}); download it again") from error
        # A file in float16 has them rounded to 11 bits.
        if found.shape != wanted.shape or not torch.allclose(found, wanted, rtol=1e-3, atol=1e-4):
            raise CheckpointError(
                f"{path}: {name} is not that of the checkpoint's config; this is the VAE of another model"
            )
