"""The decoding half of the video VAE: the module, and what streams a video out of it, as floats or as 8-bit frames."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from comfyui_h3.h3core.errors import OutputError
from comfyui_h3.h3core.models.precision import exact_fp32
from comfyui_h3.h3core.models.video_vae.config import PIXEL_MEAN, PIXEL_STD, VideoVAEConfig
from comfyui_h3.h3core.models.video_vae.tiling import AxisPlan, ChunkPlan, TilePlan
from comfyui_h3.h3core.models.video_vae.vit import Attention, AttentionFn, FeedForward, ViT
from comfyui_h3.h3core.types import Progress
from comfyui_h3.kernels.blend_tiles import TileGrid, blend_tiles, blend_tiles_to_uint8, unpatch
from comfyui_h3.kernels.normed_attention import normed_attention

TILE_BATCH = 7  # on an H200 98.3 blocks of 128 rows, which fill its 132 multiprocessors almost evenly
BYTES_PER_VALUE = 32  # of the residual: what a block holds at its widest, between the products of the MLP
FREE_SHARE = 0.5  # of the free memory, for the activations of a batch of tiles


class VideoDecoder(nn.Module):
    """Denormalised latents (B, 24, T, h, w) of one tile -> normalised pixels (B, 3, 4T, 16h, 16w) fp32.

    Built in fp32; ``to_compute_dtype`` gives the half-precision form, before or after the weights are there.
    """

    def __init__(self, config: VideoVAEConfig, attend: AttentionFn = normed_attention):
        super().__init__()
        self.config = config
        self.post_quant_conv = nn.Conv3d(config.latent_channels, config.latent_channels, 1)
        self.decoder = ViT(config, attend)

    @property
    def device(self) -> torch.device:
        return self.post_quant_conv.weight.device

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

    def patches(self, z: Tensor) -> Tensor:
        """As ``forward``, as the decoder makes them: (B, T * h * w, 3 * 4 * 16 * 16) fp32."""
        return self.decoder(self.post_quant_conv(z.to(self.compute_dtype)))

    def forward(self, z: Tensor) -> Tensor:
        _, _, _, *size = z.shape
        rows, cols = (AxisPlan(size=length, starts=(0,), overlaps=()) for length in size)
        return unpatch(self.patches(z), TileGrid(rows=rows, cols=cols, patch=self.decoder.patch))


def denormalize_latents(config: VideoVAEConfig, latents: Tensor) -> Tensor:
    """Latents of the diffusion model (24, T, h, w) -> latents of the VAE, fp32."""
    mean = latents.new_tensor(config.latents_mean).view(-1, 1, 1, 1)
    std = latents.new_tensor(config.latents_std).view(-1, 1, 1, 1)
    return latents * std + mean


def _pixel_statistics(device: torch.device) -> Tensor:
    """(2, 3): what is taken from a channel, and what divides it, to undo the normalisation of the pixels."""
    mean = [-m / s for m, s in zip(PIXEL_MEAN, PIXEL_STD, strict=True)]
    return torch.tensor([mean, [1 / s for s in PIXEL_STD]], dtype=torch.float32, device=device)


def to_unit_range(pixels: Tensor) -> Tensor:
    """Normalised pixels (3, F, H, W) -> [0, 1], as a new tensor; what is not finite stays visible as NaN."""
    mean, std = _pixel_statistics(pixels.device).view(2, 3, 1, 1, 1)
    return pixels.sub(mean).div_(std).clamp_(0, 1)


def check_finite(is_finite: Tensor, chunk: int, chunks: ChunkPlan) -> None:
    """Raise OutputError when it is False for the part of window ``chunk``; the clamp would hide an infinity."""
    if not is_finite:
        raise OutputError(
            f"the video decoder gave values that are not finite in chunk {chunk + 1} of {chunks.num_chunks}; "
            "check the latents, or decode in float32"
        )


def decode(
    decoder: VideoDecoder, latents: Tensor, *, tile_batch: int | None = None, on_tile: Progress | None = None
) -> Iterator[Tensor]:
    """Stream the frames of normalised latents (24, T, h, w) fp32 as parts (3, F_i, 16h, 16w) fp32 in [0, 1].

    A part comes as soon as it is final: 17 frames per time window, and 5 more at the end; together
    ``num_frames(config, T)``. Memory does not grow with T. ``on_tile`` counts the tiles, ``tile_batch`` at a time; the
    default is what the device has room for. Raises OutputError when the result is not finite.
    """
    return _floats(decoder, _Job.of(decoder, latents, tile_batch), on_tile)


def decode_frames(
    decoder: VideoDecoder, latents: Tensor, *, tile_batch: int | None = None, on_tile: Progress | None = None
) -> Iterator[Tensor]:
    """As ``decode``, in 8 bits and on the host: parts (F_i, 16h, 16w, 3) uint8, each valid until the next is asked for.

    A part is given out once it is checked, and while the device computes the next window.
    """
    return _frames(decoder, _Job.of(decoder, latents, tile_batch), on_tile)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Job:
    """One decode: which windows, which tiles, and how many tiles at a time."""

    latents: Tensor
    chunks: ChunkPlan
    tiles: TilePlan
    grid: TileGrid
    tile_batch: int

    @classmethod
    def of(cls, decoder: VideoDecoder, latents: Tensor, tile_batch: int | None) -> "_Job":
        config = decoder.config
        if latents.ndim != 4 or latents.shape[0] != config.latent_channels or 0 in latents.shape:
            raise ValueError(f"latents must be (24, T, h, w) with T, h, w >= 1, not {tuple(latents.shape)}")
        chunks = ChunkPlan.cover(config, latents.shape[1])
        tiles = TilePlan.cover(config, latents.shape[2], latents.shape[3])
        if tile_batch is None:
            tile_batch = usual_tile_batch(decoder, chunks.size * tiles.rows.size * tiles.cols.size)
        grid = TileGrid(rows=tiles.rows, cols=tiles.cols, patch=decoder.decoder.patch)
        return cls(latents=latents, chunks=chunks, tiles=tiles, grid=grid, tile_batch=tile_batch)


def usual_tile_batch(decoder: VideoDecoder, num_tokens: int) -> int:
    """Tiles of ``num_tokens`` that are decoded together: ``TILE_BATCH`` on a GPU, fewer where it lacks the memory."""
    device = decoder.device
    if device.type != "cuda":
        return 1
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + unused
    fitting = int(FREE_SHARE * free) // (num_tokens * decoder.config.hidden_size * BYTES_PER_VALUE)
    return max(1, min(TILE_BATCH, fitting))


def _windows(decoder: VideoDecoder, job: _Job, on_tile: Progress | None) -> Iterator[tuple[int, Tensor]]:
    """The raw tiles (num_tiles, P, 3 * 4 * 16 * 16) fp32 of one time window after the other.

    A batch may hold tiles of two windows, so that it is full also where a canvas has few.
    """
    chunks, tiles, num_tiles = job.chunks, job.tiles, job.tiles.num_tiles
    z = chunks.pad(denormalize_latents(decoder.config, job.latents.to(decoder.device, torch.float32)))
    total = chunks.num_chunks * num_tiles
    if on_tile is not None:
        on_tile(0, total)
    window: Tensor | None = None
    for start in range(0, total, job.tile_batch):
        batch = range(start, min(start + job.tile_batch, total))
        with exact_fp32():  # left inside the loop: what runs between the windows is the caller's
            cuts = [tiles.cut(chunks.window(z, index // num_tiles), index % num_tiles, 1) for index in batch]
            patches = decoder.patches(torch.stack(cuts))
        if on_tile is not None:
            on_tile(batch.stop, total)
        for index, tile in zip(batch, patches, strict=True):
            if window is None:
                window = tile.new_empty(num_tiles, *tile.shape)
            window[index % num_tiles] = tile
            if index % num_tiles == num_tiles - 1:
                yield index // num_tiles, window
                window = None


@torch.no_grad()
def _floats(decoder: VideoDecoder, job: _Job, on_tile: Progress | None) -> Iterator[Tensor]:
    before: Tensor | None = None
    for chunk, tiles in _windows(decoder, job, on_tile):
        for frames in job.chunks.final(chunk):
            part = blend_tiles(tiles, job.grid, frames.start, len(frames), before)
            before = None
            check_finite(part.sum().isfinite(), chunk, job.chunks)  # one wait
            yield to_unit_range(part)
        if chunk < job.chunks.num_chunks - 1:
            before = blend_tiles(tiles, job.grid, job.chunks.tail.start, len(job.chunks.tail))


@torch.no_grad()
def _frames(decoder: VideoDecoder, job: _Job, on_tile: Progress | None) -> Iterator[Tensor]:
    outbox = _Outbox(decoder.device)
    statistics = _pixel_statistics(decoder.device)
    before: Tensor | None = None
    for chunk, tiles in _windows(decoder, job, on_tile):
        for frames in job.chunks.final(chunk):
            bad = torch.zeros(1, dtype=torch.int32, device=decoder.device)
            part = blend_tiles_to_uint8(tiles, job.grid, frames.start, len(frames), before, statistics, bad)
            before = None
            outbox.send(part, bad, chunk)
            if outbox.is_full:
                yield outbox.take(job.chunks)
        if chunk < job.chunks.num_chunks - 1:
            before = blend_tiles(tiles, job.grid, job.chunks.tail.start, len(job.chunks.tail))
    while not outbox.is_empty:
        yield outbox.take(job.chunks)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sent:
    """pixels, bad: on the host, valid once ``done`` (None: at once). sources: what is copied, held until then, as its
    memory would be given to the stream that computes."""

    pixels: Tensor
    bad: Tensor
    chunk: int
    done: torch.cuda.Event | None = None
    sources: tuple[Tensor, ...] = ()


class _Outbox:
    """Parts on their way to the host, in order.

    On a GPU a part is copied by a stream of its own into one of two pinned buffers, and waited for when it is taken:
    by then the device has the next window to work on.
    """

    SIZE = 2

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers: list[Tensor | None] = [None] * self.SIZE
        self._num_sent = 0
        self._waiting: deque[_Sent] = deque()

    @property
    def is_full(self) -> bool:
        return len(self._waiting) == self.SIZE

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    def send(self, part: Tensor, bad: Tensor, chunk: int) -> None:
        """part: uint8; bad: one int32, not 0 where the part was made of values that are not finite."""
        assert not self.is_full
        if self._stream is None:
            self._waiting.append(_Sent(pixels=part, bad=bad, chunk=chunk))
            return
        self._stream.wait_stream(torch.cuda.current_stream(part.device))
        with torch.cuda.stream(self._stream):
            pixels, flag = self._pinned(part)
            pixels.copy_(part, non_blocking=True)
            flag.copy_(bad.view(torch.uint8), non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        self._waiting.append(_Sent(pixels=pixels, bad=flag, chunk=chunk, done=done, sources=(part, bad)))

    def take(self, chunks: ChunkPlan) -> Tensor:
        """The oldest part, on the host until two more are sent. Raises OutputError when it was not finite."""
        sent = self._waiting.popleft()
        if sent.done is not None:
            sent.done.synchronize()
        check_finite((sent.bad == 0).all(), sent.chunk, chunks)
        return sent.pixels

    def _pinned(self, part: Tensor) -> tuple[Tensor, Tensor]:
        """Room for ``part`` and its flag. A part is never larger than the first."""
        index = self._num_sent % self.SIZE
        self._num_sent += 1
        buffer = self._buffers[index]
        if buffer is None or buffer.numel() < part.numel() + 4:
            buffer = self._buffers[index] = torch.empty(part.numel() + 4, dtype=torch.uint8, pin_memory=True)
        return buffer[4 : 4 + part.numel()].view(part.shape), buffer[:4]
