"""Scales of blocks as FP4 and FP8 products of a GPU read them: in tiles of 128 rows by 4 blocks.

A tile's 512 bytes hold row r, block c at 16 * (r % 32) + 4 * (r // 32) + c; tiles are in row-major order, and the last
ones padded. Source: cuBLAS, "1D Block Scaling Factors Layout".
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE_ROWS, TILE_BLOCKS = 128, 4


def padded(num_rows: int, num_blocks: int) -> tuple[int, int]:
    """The shape in which the scales of (num_rows, num_blocks) are stored."""
    return -(-num_rows // TILE_ROWS) * TILE_ROWS, -(-num_blocks // TILE_BLOCKS) * TILE_BLOCKS


def row_major(scales: Tensor, num_rows: int, num_blocks: int) -> Tensor:
    """Scales of one byte each, in tiles -> (num_rows, num_blocks) uint8."""
    rows, blocks = padded(num_rows, num_blocks)
    tiles = scales.view(torch.uint8).reshape(rows // TILE_ROWS, blocks // TILE_BLOCKS, 32, 4, TILE_BLOCKS)
    # (tile row, tile column, r % 32, r // 32, c) -> (tile row, r // 32, r % 32, tile column, c)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, blocks)[:num_rows, :num_blocks]
