"""Which linears are replaced by linears in 8 bits."""

import re

import pytest
import torch
from torch import nn

from comfyui_h3.h3core.accel.fp8 import use_fp8_linears
from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.models.fp8_linear import Fp8Linear


def test_only_linears_that_match_are_replaced():
    with torch.device("meta"):
        module = nn.ModuleDict({"a": nn.Linear(32, 16), "b": nn.Linear(32, 16), "c": nn.LayerNorm(32)})
    assert use_fp8_linears(module, re.compile("a|c")) is module
    assert isinstance(module["a"], Fp8Linear)
    assert isinstance(module["b"], nn.Linear)
    assert isinstance(module["c"], nn.LayerNorm)
    assert module["a"].weight.is_meta
    assert module["a"].bias is not None


def test_sizes_without_a_product_in_8_bits_are_refused():
    with torch.device("meta"):
        module = nn.ModuleDict({"proj": nn.Linear(40, 16)})
    with pytest.raises(RequestError, match=r"proj is 40 by 16.*multiples of 16.*precision=bfloat16"):
        use_fp8_linears(module, re.compile("proj"))
