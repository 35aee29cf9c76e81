"""Quantised linears by formulas of their own, element by element where that is what the format says.

Each writer takes a weight (N, K), and gives the tensors that a file holds for the linear, by the last part of their
keys, and the weight that they stand for in float64.
"""

import json
from functools import lru_cache

import numpy as np
import torch

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def marker(**options):
    """The tensor ``comfy_quant``."""
    return torch.tensor(list(json.dumps(options).encode()), dtype=torch.uint8)


def fp8_scaled(weight, *, per_row=False, dtype=torch.float8_e4m3fn):
    largest = weight.abs().amax(1, keepdim=True) if per_row else weight.abs().max()
    scale = (largest / torch.finfo(dtype).max).float()
    stored = (weight / scale).to(dtype)
    return {"weight": stored, "weight_scale": scale}, stored.double() * scale.double()


def int8(weight, *, per_row=True, group=None):
    """With ``group``, in the basis of ``rotation``."""
    turned = weight.double()
    if group:
        turned = (turned.unflatten(1, (-1, group)) @ rotation(group)).flatten(1)
    scale = ((turned.abs().amax(1, keepdim=True) if per_row else turned.abs().max()) / 127).float()
    stored = (turned / scale).round().clamp(-127, 127).to(torch.int8)
    expected = stored.double() * scale.double()
    if group:
        expected = (expected.unflatten(1, (-1, group)) @ rotation(group).T).flatten(1)
    return {"weight": stored, "weight_scale": scale}, expected


@lru_cache
def rotation(size):
    """R by its elements: a sign for each base-4 digit in which the indexes add up to 3."""
    row, column = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    matrix = torch.full((size, size), size**-0.5, dtype=torch.float64)
    for _ in range(round(np.log2(size)) // 2):
        matrix *= torch.where(row % 4 + column % 4 == 3, -1, 1)
        row, column = row // 4, column // 4
    return matrix


def nvfp4(weight, *, pre_quant_scale=None):
    """``weight`` multiplies rows that were multiplied by ``pre_quant_scale``."""
    blocks = weight.double().unflatten(1, (-1, 16))
    tensor_scale = (blocks.abs().max() / (6 * 448)).float()
    scales = (blocks.abs().amax(-1) / 6 / tensor_scale).to(torch.float8_e4m3fn)
    codes, values = nearest_e2m1(blocks / (scales.double()[..., None] * tensor_scale.double()))
    expected = (values * scales.double()[..., None] * tensor_scale.double()).flatten(1)
    tensors = {
        "weight": pack(codes.flatten(1), even_shift=4),
        "weight_scale": in_tiles(scales.view(torch.uint8)).view(torch.float8_e4m3fn),
        "weight_scale_2": tensor_scale,
    }
    if pre_quant_scale is not None:
        tensors["pre_quant_scale"] = pre_quant_scale
        expected = expected * pre_quant_scale.double()
    return tensors, expected


def mxfp8(weight):
    blocks = weight.double().unflatten(1, (-1, 32))
    exponents = (blocks.abs().amax(-1) / 448).log2().ceil()
    stored = (blocks / exponents.exp2()[..., None]).to(torch.float8_e4m3fn)
    codes = (exponents + 127).to(torch.uint8)
    tensors = {"weight": stored.flatten(1), "weight_scale": in_tiles(codes).view(torch.float8_e8m0fnu)}
    return tensors, (stored.double() * exponents.exp2()[..., None]).flatten(1)


def svdquant(weight, *, rank=8, smooth=None, per_channel=False):
    """The largest singular vectors in bfloat16, and the rest in four bits, its columns times ``smooth``."""
    u, s, vh = torch.linalg.svd(weight.double(), full_matrices=False)
    up, down = (u[:, :rank] * s[:rank]).bfloat16(), vh[:rank].T.contiguous().bfloat16()
    smooth = torch.ones(weight.shape[1]).bfloat16() if smooth is None else smooth
    rest = (weight.double() - up.double() @ down.double().T) * smooth.double()
    channel = rest.abs().amax(1) / rest.abs().max() if per_channel else torch.ones(len(rest))
    channel = channel.bfloat16()
    blocks = (rest / channel.double()[:, None]).unflatten(1, (-1, 16))
    tensor_scale = (blocks.abs().max() / (6 * 448)).bfloat16()
    scales = (blocks.abs().amax(-1) / 6 / tensor_scale.double()).to(torch.float8_e4m3fn)
    codes, values = nearest_e2m1(blocks / (scales.double()[..., None] * tensor_scale.double()))
    base = (values * scales.double()[..., None]).flatten(1) * tensor_scale.double() * channel.double()[:, None]
    tensors = {
        "qweight": pack(codes.flatten(1), even_shift=0).view(torch.int8),
        "wscales": scales.view(torch.uint8).T.contiguous().view(torch.float8_e4m3fn),
        "wtscale": tensor_scale.reshape(1),
        "smooth_factor": smooth,
        "proj_down": down,
        "proj_up": up,
    }
    if per_channel:
        tensors["wcscales"] = channel
    return tensors, base / smooth.double() + up.double() @ down.double().T


def nearest_e2m1(x):
    """Codes and values nearest to ``x``; of two as near, the one whose code is even."""
    distance = (x.abs()[..., None] - torch.from_numpy(E2M1)).abs().numpy()
    odd_is_farther = np.where(np.arange(8) % 2, 1e-12, 0)
    magnitude = torch.from_numpy((distance + odd_is_farther).argmin(-1))
    codes = magnitude + 8 * (x < 0)
    return codes.to(torch.uint8), torch.from_numpy(E2M1)[magnitude] * torch.where(x < 0, -1, 1)


def pack(codes, *, even_shift):
    """Two codes in a byte, that of an even k shifted by ``even_shift`` bits, 4 or 0."""
    return codes[:, 0::2] << even_shift | codes[:, 1::2] << (4 - even_shift)


def in_tiles(scales):
    """Bytes (N, B) in tiles of 128 rows by 4 blocks, by the offset of each; padding is 0x7f, NaN in e4m3."""
    num_rows, num_blocks = scales.shape
    rows, blocks = -(-num_rows // 128) * 128, -(-num_blocks // 4) * 4
    row, block = torch.meshgrid(torch.arange(num_rows), torch.arange(num_blocks), indexing="ij")
    tile = row // 128 * (blocks // 4) + block // 4
    out = torch.full((rows * blocks,), 0x7F, dtype=torch.uint8)
    out[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4] = scales
    return out.reshape(rows, blocks)
