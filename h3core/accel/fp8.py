"""Puts linears in 8 bits in the place of those of a model: a named approximation, never on by itself."""

from __future__ import annotations

import re
from typing import TypeVar

import torch
from torch import nn

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.models.fp8_linear import Fp8Linear

MULTIPLE = 16  # of both sizes of a product in 8 bits

M = TypeVar("M", bound=nn.Module)


def use_fp8_linears(module: M, names: re.Pattern[str]) -> M:
    """``module``, on meta, with an ``Fp8Linear`` in the place of every linear whose name matches.

    Raises RequestError for a linear whose sizes have no product in 8 bits.
    """
    for name, linear in list(module.named_modules()):
        if not isinstance(linear, nn.Linear) or not names.fullmatch(name):
            continue
        if linear.in_features % MULTIPLE or linear.out_features % MULTIPLE:
            raise RequestError(
                f"precision=fp8 cannot run: {name} is {linear.in_features} by {linear.out_features}, and products in "
                f"8 bits take multiples of {MULTIPLE}; use precision=bfloat16"
            )
        owner, _, leaf = name.rpartition(".")
        with torch.device("meta"):
            fp8 = Fp8Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)
        setattr(module.get_submodule(owner), leaf, fp8.train(linear.training))
    return module
