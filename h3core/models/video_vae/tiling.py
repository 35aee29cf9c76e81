"""Which tiles and which time windows a video is coded in, and how their results are joined.

Tiles are part of the model: the decoder's positions are relative to the tile, so it must see windows of one size.
All lengths of a tile plan are in latents (16 pixels); the frames of a video are counted here too.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from comfyui_h3.h3core.models.video_vae.config import VideoVAEConfig
from comfyui_h3.kernels.blend_tiles import blend_into


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPlan:
    """Windows along one axis: window i covers [starts[i], starts[i] + size) and shares overlaps[i] with the next."""

    size: int
    starts: tuple[int, ...]
    overlaps: tuple[int, ...]

    @classmethod
    def cover(cls, length: int, size: int, min_overlap: int) -> "AxisPlan":
        """The fewest windows of ``size`` that cover ``length``; what is left over widens the overlaps in turn."""
        if length <= size:
            return cls(size=length, starts=(0,), overlaps=())
        num = -(-length // size)
        while num * size - (num - 1) * min_overlap < length:
            num += 1
        spare = num * size - (num - 1) * min_overlap - length
        share, extra = divmod(spare, num - 1)
        overlaps = tuple(min_overlap + share + (i < extra) for i in range(num - 1))
        starts = [0]
        for overlap in overlaps:
            starts.append(starts[-1] + size - overlap)
        return cls(size=size, starts=tuple(starts), overlaps=overlaps)

    def kept(self, index: int) -> int:
        """Length of window ``index`` that stays: its end belongs to the next window."""
        return self.size - self.overlaps[index] if index < len(self.overlaps) else self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePlan:
    """Tiles of one canvas in row-major order; all have one shape."""

    rows: AxisPlan
    cols: AxisPlan

    @classmethod
    def cover(cls, config: VideoVAEConfig, height: int, width: int) -> "TilePlan":
        """``height`` and ``width`` in latents."""
        size, overlap = config.tile_size // config.space_ratio, config.tile_overlap // config.space_ratio
        return cls(rows=AxisPlan.cover(height, size, overlap), cols=AxisPlan.cover(width, size, overlap))

    @property
    def num_tiles(self) -> int:
        return len(self.rows.starts) * len(self.cols.starts)

    def batches(self, tile_batch: int) -> Iterator[range]:
        for first in range(0, self.num_tiles, tile_batch):
            yield range(first, min(first + tile_batch, self.num_tiles))

    def cut(self, x: Tensor, index: int, scale: int) -> Tensor:
        """Tile ``index`` of x (..., scale * height, scale * width), as a view."""
        i, j = divmod(index, len(self.cols.starts))
        x = x.narrow(-2, self.rows.starts[i] * scale, self.rows.size * scale)
        return x.narrow(-1, self.cols.starts[j] * scale, self.cols.size * scale)


class TileCanvas:
    """Joins the tiles of one clip; used again for every clip, so an encode holds one canvas however long the video is.

    Tiles come in row-major order. A tile is mixed with its upper, then with its left neighbour, both as they were
    decoded; only the strips of them that are still needed are kept.
    """

    def __init__(self, plan: TilePlan, scale: int):
        self._plan = plan
        self._scale = scale
        self._canvas: Tensor | None = None
        self._next = 0
        self._left: Tensor | None = None
        self._above: dict[int, Tensor] = {}

    def add(self, tiles: Tensor) -> None:
        """tiles (B, C, F, h, w): the next B tiles."""
        for tile in tiles.unbind():
            self._add(tile)

    def _add(self, tile: Tensor) -> None:
        rows, cols, scale = self._plan.rows, self._plan.cols, self._scale
        i, j = divmod(self._next, len(cols.starts))
        self._next += 1
        height, width = rows.kept(i) * scale, cols.kept(j) * scale
        region = self._buffer(tile)[
            ...,
            rows.starts[i] * scale : rows.starts[i] * scale + height,
            cols.starts[j] * scale : cols.starts[j] * scale + width,
        ]
        region.copy_(tile[..., :height, :width])
        if i > 0:
            blend_into(region, self._above.pop(j)[..., :width], dim=-2)
        if j > 0:
            assert self._left is not None
            blend_into(region, self._left[..., :height, :], dim=-1)
        # Copies: a view would keep the whole batch of tiles alive.
        self._left = tile[..., width:].clone() if j < len(cols.overlaps) else None
        if i < len(rows.overlaps):
            self._above[j] = tile[..., height:, :].clone()

    def finish(self) -> Tensor:
        """The joined clip (C, F, H, W); valid until the next ``add``."""
        assert self._next == self._plan.num_tiles
        assert self._canvas is not None
        self._next = 0
        return self._canvas

    def _buffer(self, tile: Tensor) -> Tensor:
        rows, cols = self._plan.rows, self._plan.cols
        height = (rows.starts[-1] + rows.size) * self._scale
        width = (cols.starts[-1] + cols.size) * self._scale
        shape = (*tile.shape[:-2], height, width)
        if self._canvas is None or self._canvas.shape != shape:
            self._canvas = tile.new_empty(shape)
        return self._canvas


def num_frames(config: VideoVAEConfig, num_tokens: int) -> int:
    """Frames that ``num_tokens`` latent frames stand for: 1 for the first of every 5, 4 for each of the others."""
    clips, rest = divmod(num_tokens, config.tokens_per_clip)
    return clips * config.clip_length + (1 + (rest - 1) * config.time_ratio if rest else 0)


def num_tokens(config: VideoVAEConfig, frames: int) -> int:
    """Latent frames that ``frames`` are encoded to. One frame is an image; a video loses the last tokens of its last
    clip, which a following clip would be needed for."""
    if frames == 1:
        return 1
    return -(-frames // config.clip_length) * config.tokens_per_clip - config.token_drop


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    """Time windows of a decode: window i reads latent frames [i * stride, i * stride + size) of ``num_padded``.

    A decoded window of 28 frames is 3 that stand for nothing, ``main``: 17 of its own, 3 dropped, and ``tail``: 5 that
    fade into the next window. num_frames: of the whole video.
    """

    num_tokens: int
    num_padded: int
    num_chunks: int
    stride: int
    size: int
    num_frames: int
    main: range
    tail: range

    @classmethod
    def cover(cls, config: VideoVAEConfig, num_tokens: int) -> "ChunkPlan":
        ratio = config.time_ratio
        if num_tokens == 1:  # an image: the last frame of one window of one latent frame
            main, tail = range(ratio - 1, ratio), range(ratio, ratio)
            return cls(num_tokens=1, num_padded=1, num_chunks=1, stride=1, size=1, num_frames=1, main=main, tail=tail)
        stride = config.tokens_per_clip
        size = stride + config.token_overlap
        num_chunks = max(1, -(-(num_tokens - config.token_overlap) // stride))
        first = config.frame_pre_padding
        return cls(
            num_tokens=num_tokens,
            num_padded=num_chunks * stride + config.token_overlap,
            num_chunks=num_chunks,
            stride=stride,
            size=size,
            num_frames=num_frames(config, num_tokens),
            main=range(first, first + config.clip_length),
            tail=range(size * ratio - config.frame_overlap, size * ratio),
        )

    def pad(self, latents: Tensor) -> Tensor:
        """(C, num_tokens, h, w) -> (C, num_padded, h, w): the last latent frame is repeated."""
        missing = self.num_padded - self.num_tokens
        if not missing:
            return latents
        return torch.cat([latents, latents[:, -1:].expand(-1, missing, -1, -1)], dim=1)

    def window(self, latents: Tensor, chunk: int) -> Tensor:
        return latents.narrow(1, chunk * self.stride, self.size)

    def final(self, chunk: int) -> list[range]:
        """Frames of window ``chunk`` that are final once it is decoded: its own, and the tail of the last window."""
        left = self.num_frames - chunk * len(self.main)
        parts = [self.main[:left]]
        if chunk == self.num_chunks - 1:
            parts.append(self.tail[: max(0, left - len(self.main))])
        return [part for part in parts if part]
