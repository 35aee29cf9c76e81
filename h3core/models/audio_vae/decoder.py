"""The decoding half of the audio VAE: the module, and ``decode``, which makes a waveform with it."""

import torch
from torch import Tensor, nn

from comfyui_h3.h3core.errors import OutputError
from comfyui_h3.h3core.models.audio_vae.config import AudioVAEConfig
from comfyui_h3.h3core.models.audio_vae.vocoder import Conv, Vocoder
from comfyui_h3.h3core.models.audio_vae.weight_norm import fold_weight_norm
from comfyui_h3.h3core.models.precision import exact_fp32


class AudioDecoder(nn.Module):
    """Denormalised latents (B, 32, A) -> mono waveforms (B, 1, 800 * A) in [-1, 1].

    fp32 only: in bf16 the sound is audibly worse.
    """

    def __init__(self, config: AudioVAEConfig):
        super().__init__()
        self.config = config
        self.dec_in_proj = nn.Conv1d(config.latent_channels, config.latent_dim, 1)
        self.decoder = Vocoder(config)

    def fold_weight_norm(self) -> None:
        """Fold the weights once they are there: the same sound without computing every weight anew in each call.

        In memory they then lie as the kernel reads them: the taps of all channels, the channels innermost.
        """
        fold_weight_norm(self)
        for module in self.modules():
            if isinstance(module, Conv):
                module.weight = nn.Parameter(module.weight.mT.contiguous().mT, requires_grad=False)

    def forward(self, z: Tensor) -> Tensor:
        return self.decoder(self.dec_in_proj(z))


@torch.no_grad()
def decode(decoder: AudioDecoder, latents: Tensor) -> Tensor:
    """Normalised latents of two channels (2, 32, A) fp32 -> their samples (2, 800 * A) fp32 in [-1, 1].

    Equal latents give equal bits. Raises OutputError when the result is not finite.
    """
    config = decoder.config
    if latents.ndim != 3 or latents.shape[1] != config.latent_channels or 0 in latents.shape:
        raise ValueError(f"latents must be (channels, {config.latent_channels}, A), not {tuple(latents.shape)}")
    latents = latents.to(decoder.dec_in_proj.weight.device, torch.float32)
    mean = latents.new_tensor(config.latents_mean)[:, None]
    std = latents.new_tensor(config.latents_std)[:, None]
    with exact_fp32():
        samples = decoder(latents * std + mean).squeeze(1)
    if not torch.isfinite(samples.sum()):  # the clamp keeps NaN; an infinity becomes NaN in the next activation
        raise OutputError("the audio decoder gave samples that are not finite; check the audio latents")
    return samples
