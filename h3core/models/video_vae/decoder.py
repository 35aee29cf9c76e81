"""The decoding half of the video VAE: the module, and ``decode``, which streams a video out of it."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from comfyui_h3.h3core.errors import OutputError
from comfyui_h3.h3core.models.precision import exact_fp32
from comfyui_h3.h3core.models.video_vae.config import PIXEL_MEAN, PIXEL_STD, VideoVAEConfig
from comfyui_h3.h3core.models.video_vae.tiling import ChunkJoiner, ChunkPlan, TileCanvas, TilePlan
from comfyui_h3.h3core.models.video_vae.vit import Attention, AttentionFn, FeedForward, ViT, sdpa
from comfyui_h3.h3core.types import Progress


class VideoDecoder(nn.Module):
    """Denormalised latents (B, 24, T, h, w) of one tile -> normalised pixels (B, 3, 4T, 16h, 16w) fp32.

    Built in fp32; ``to_compute_dtype`` gives the half-precision form, before or after the weights are there.
    """

    def __init__(self, config: VideoVAEConfig, attend: AttentionFn = sdpa):
        super().__init__()
        self.config = config
        self.post_quant_conv = nn.Conv3d(config.latent_channels, config.latent_channels, 1)
        self.decoder = ViT(config, attend)

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.post_quant_conv.weight.dtype

    def to_compute_dtype(self, dtype: torch.dtype) -> "VideoDecoder":
        """Convert in place what may be half: ``post_quant_conv`` and the matrix products of the blocks, with biases.

        float16 is the flow of the released pipelines; bfloat16 works and is about eight times coarser.
        """
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"the video decoder cannot compute in {dtype}; use float32, float16 or bfloat16")
        self.post_quant_conv.to(dtype)
        for module in self.decoder.transformer_blocks.modules():
            if isinstance(module, (Attention, FeedForward)):
                module.to(dtype)
        return self

    def forward(self, z: Tensor) -> Tensor:
        return self.decoder(self.post_quant_conv(z.to(self.compute_dtype)))


def denormalize_latents(config: VideoVAEConfig, latents: Tensor) -> Tensor:
    """Latents of the diffusion model (24, T, h, w) -> latents of the VAE, fp32."""
    mean = latents.new_tensor(config.latents_mean).view(-1, 1, 1, 1)
    std = latents.new_tensor(config.latents_std).view(-1, 1, 1, 1)
    return latents * std + mean


def to_unit_range(pixels: Tensor) -> Tensor:
    """Normalised pixels (3, F, H, W) -> [0, 1], as a new tensor; what is not finite stays visible as NaN."""
    mean = pixels.new_tensor([-m / s for m, s in zip(PIXEL_MEAN, PIXEL_STD, strict=True)]).view(-1, 1, 1, 1)
    std = pixels.new_tensor([1 / s for s in PIXEL_STD]).view(-1, 1, 1, 1)
    return pixels.sub(mean).div_(std).clamp_(0, 1)


def check_finite(pixels: Tensor, chunk: int, num_chunks: int) -> None:
    """Raise OutputError when one value is not finite: one sum and one wait, before the clamp hides an infinity."""
    if not torch.isfinite(pixels.sum()):
        raise OutputError(
            f"the video decoder gave values that are not finite in chunk {chunk + 1} of {num_chunks}; "
            "check the latents, or decode in float32"
        )


def decode(
    decoder: VideoDecoder, latents: Tensor, *, tile_batch: int = 1, on_tile: Progress | None = None
) -> Iterator[Tensor]:
    """Stream the frames of normalised latents (24, T, h, w) fp32 as parts (3, F_i, 16h, 16w) fp32 in [0, 1].

    A part comes as soon as it is final: 17 frames per time window, and 5 more at the end; together
    ``num_frames(config, T)``. Memory does not grow with T. ``on_tile`` counts the tiles, ``tile_batch`` at a time.
    Raises OutputError when the result is not finite.
    """
    if latents.ndim != 4 or latents.shape[0] != decoder.config.latent_channels or 0 in latents.shape:
        raise ValueError(f"latents must be (24, T, h, w) with T, h, w >= 1, not {tuple(latents.shape)}")
    return _stream(decoder, latents, tile_batch, on_tile)


@torch.no_grad()
def _stream(decoder: VideoDecoder, latents: Tensor, tile_batch: int, on_tile: Progress | None) -> Iterator[Tensor]:
    config = decoder.config
    chunks = ChunkPlan.cover(config, latents.shape[1])
    tiles = TilePlan.cover(config, latents.shape[2], latents.shape[3])
    device = decoder.post_quant_conv.weight.device
    z = chunks.pad(denormalize_latents(config, latents.to(device, torch.float32)))
    canvas = TileCanvas(tiles, config.space_ratio)
    joiner = ChunkJoiner(config, chunks)
    total = chunks.num_chunks * tiles.num_tiles
    if on_tile is not None:
        on_tile(0, total)
    for chunk in range(chunks.num_chunks):
        window = chunks.window(z, chunk)
        for batch in tiles.batches(tile_batch):
            with exact_fp32():  # left inside the loop: what runs between the parts is the caller's
                canvas.add(decoder(torch.stack([tiles.cut(window, index, 1) for index in batch])))
            if on_tile is not None:
                on_tile(chunk * tiles.num_tiles + batch.stop, total)
        for part in joiner.add(canvas.finish()):
            check_finite(part, chunk, chunks.num_chunks)
            yield to_unit_range(part)
