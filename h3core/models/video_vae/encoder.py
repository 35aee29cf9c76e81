"""The encoding half of the video VAE: the module, and ``encode``, which makes latents of an image or a video."""

import torch
from torch import Tensor, nn

from comfyui_h3.h3core.config import EncodePrecision
from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.models.precision import exact_fp32
from comfyui_h3.h3core.models.video_vae.blocks import ConvEncoder
from comfyui_h3.h3core.models.video_vae.config import PIXEL_MEAN, PIXEL_STD, VideoVAEConfig
from comfyui_h3.h3core.models.video_vae.split_encoder import SplitEncoder, choose_planes
from comfyui_h3.h3core.models.video_vae.tiling import TileCanvas, TilePlan, num_tokens
from comfyui_h3.h3core.types import Progress

MIN_SIDE = 32  # the mirrored border needs two pixels at every level

# The reference draws the posterior with this seed, whatever the seed of the request.
POSTERIOR_SEED = 42

# Tiles encoded at a time, unless a caller says otherwise. In float32 one fills a GPU, and all of a clip would take
# gigabytes; the split encoder batches what fills it, and deep down one tile is far from that.
TILE_BATCH = 1
SPLIT_TILE_BATCH = 32


class VideoEncoder(nn.Module):
    """Normalised pixels of tiles (B, 3, T, H, W) of one clip -> moments: 24 means, then 24 log variances. fp32 only."""

    def __init__(self, config: VideoVAEConfig):
        super().__init__()
        self.config = config
        self.encoder = ConvEncoder(config)
        self.quant_conv = nn.Conv3d(2 * config.latent_channels, 2 * config.latent_channels, 1)
        self._split: dict[int, SplitEncoder] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.quant_conv(self.encoder(x))

    def split(self, planes: int) -> SplitEncoder:
        """The same function on tensor cores, made of the weights at the first call and then kept."""
        if planes not in self._split:
            self._split[planes] = SplitEncoder(self.encoder, self.quant_conv, planes)
        return self._split[planes]


def normalize_pixels(pixels: Tensor) -> Tensor:
    """(3, F, H, W) uint8, or floating in [0, 1] -> what the encoder reads, fp32."""
    pixels = pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels.float()
    mean = pixels.new_tensor(PIXEL_MEAN).view(-1, 1, 1, 1)
    std = pixels.new_tensor(PIXEL_STD).view(-1, 1, 1, 1)
    return (pixels - mean) / std


def encode(
    encoder: VideoEncoder,
    pixels: Tensor,
    *,
    exact: bool = False,
    precision: EncodePrecision = "float32",
    tile_batch: int | None = None,
    on_tile: Progress | None = None,
) -> Tensor:
    """An image (F = 1) or a video (3, F, H, W) -> its normalised latents (24, T, H // 16, W // 16) fp32 on the CPU.

    pixels: uint8, or floating in [0, 1]. T is 1 for an image, else 5 * ceil(F / 17) - 3; the right and bottom border
    is cut to multiples of 16. Raises RequestError where a side is below 32. Equal inputs give equal latents: the
    posterior is drawn with a fixed seed. exact, precision: see ``encode_moments``.
    """
    moments = encode_moments(encoder, pixels, exact=exact, precision=precision, tile_batch=tile_batch, on_tile=on_tile)
    return normalize_latents(encoder.config, sample_posterior(moments))


@torch.no_grad()
def encode_moments(
    encoder: VideoEncoder,
    pixels: Tensor,
    *,
    exact: bool = False,
    precision: EncodePrecision = "float32",
    tile_batch: int | None = None,
    on_tile: Progress | None = None,
) -> Tensor:
    """As ``encode``, up to the moments (48, T, H // 16, W // 16) fp32 of the posterior, on the encoder's device.

    The last clip of a video is encoded from the 5 frames that its latents depend on. With ``exact`` it is filled up to
    17, as the reference does: the same but for the order of sums, which other sizes of a convolution change. precision:
    see ``choose_planes``.
    """
    config = encoder.config
    unit = config.space_ratio
    frames, height, width = pixels.shape[1], pixels.shape[2] // unit, pixels.shape[3] // unit
    if min(pixels.shape[2:]) < MIN_SIDE or not frames:
        raise RequestError(
            f"an image or video of {pixels.shape[3]}x{pixels.shape[2]}, {frames} frames cannot be encoded; "
            f"it needs sides of at least {MIN_SIDE} pixels and at least one frame"
        )
    pixels = pixels[..., : height * unit, : width * unit]
    plan = TilePlan.cover(config, height, width)
    canvas = TileCanvas(plan, scale=1)
    length = 1 if frames == 1 else config.clip_length
    num_clips = -(-frames // length)
    device = encoder.quant_conv.weight.device
    planes = choose_planes(precision, exact, config, device)
    forward = encoder if planes is None else encoder.split(planes)
    if tile_batch is None:
        tile_batch = TILE_BATCH if planes is None else SPLIT_TILE_BATCH
    total = num_clips * plan.num_tiles
    if on_tile is not None:
        on_tile(0, total)
    moments = []
    with exact_fp32():  # TF32 moves the latents of a keyframe visibly
        for clip in range(num_clips):
            x = pixels[:, clip * length : (clip + 1) * length].to(device)
            if frames > 1 and clip == num_clips - 1:
                x = _as_many(x, length if exact else config.last_clip_length)
            for batch in plan.batches(tile_batch):
                # Tile by tile: in float32 a whole clip at 1344x768 is a gigabyte with what its arithmetic takes.
                canvas.add(forward(torch.stack([normalize_pixels(plan.cut(x, index, unit)) for index in batch])))
                if on_tile is not None:
                    on_tile(clip * plan.num_tiles + batch.stop, total)
            moments.append(canvas.finish().clone())
    return torch.cat(moments, dim=1)[:, : num_tokens(config, frames)]


def _as_many(frames: Tensor, wanted: int) -> Tensor:
    """The first ``wanted`` frames, the last one repeated where there are fewer."""
    missing = max(0, wanted - frames.shape[1])
    return torch.cat([frames, frames[:, -1:].expand(-1, missing, -1, -1)], dim=1)[:, :wanted]


def sample_posterior(moments: Tensor) -> Tensor:
    """One draw z (24, T, h, w) of the posterior, rounded to fp16 as the reference stores it, fp32 on the CPU."""
    mean, log_variance = moments.float().chunk(2)
    std = torch.exp(0.5 * log_variance.clamp(-30, 20))
    generator = torch.Generator("cpu").manual_seed(POSTERIOR_SEED)
    noise = torch.randn((1, *mean.shape), generator=generator, dtype=torch.float32, device="cpu")[0]
    return (mean + std * noise.to(mean.device)).half().float().cpu()


def normalize_latents(config: VideoVAEConfig, z: Tensor) -> Tensor:
    """Latents of the VAE (24, T, h, w) -> latents of the diffusion model."""
    mean = z.new_tensor(config.latents_mean).view(-1, 1, 1, 1)
    std = z.new_tensor(config.latents_std).view(-1, 1, 1, 1)
    return (z - mean) / std
