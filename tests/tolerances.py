"""Every tolerance of the tests, with its reason. A test that needs none compares bit by bit."""

import torch
from torch import Tensor

# A kernel adds the squares of a row in another order than PyTorch does, so the fp32 mean differs in its last bits and
# the normed value falls to the other side of a bf16 rounding boundary now and then. fp32 is 2**16 times finer than
# bf16, so a few units in the last place of the mean move about one element in 10**4.
NORM_DIFFERENT_SHARE = 1e-3
# Where it does, the normed value is its bf16 neighbour.
NORM_ULPS = 1
# A product with a neighbour is at most two steps of its own size away from the exact chain's (a step of the factor,
# which may be twice a step of the product, and the rounding), and a sum of two such products, or a product and a
# shift, as far again. Counted in steps of the largest term, as the sum itself may cancel to nearly nothing.
NORM_THEN_PRODUCTS_ULPS = 4

# float32 results against diffusers, relative to the largest value: two implementations of one sum differ by the order
# of its terms. The bar for parity; most of what is compared is bit-equal.
PARITY = 2e-5

# Latents of a medium are rounded to float16, as in the reference. A sum in another order lets a few of them fall to the
# other side of a rounding boundary: at most one step of float16 (2**-11 of the value, twice that of the normalised one,
# whose mean was taken away).
LATENT_STEP = 2e-3
LATENT_STEPS_SHARE = 0.02

# One bf16 rounding of an attention's result, and of the probabilities on the way: 2**-8 of the largest value each.
BF16_ATTENTION = 2**-7

# The same in e4m3, which has 4 significant bits: 2**-4 for a query, a key or a value. Seen on random rows: 0.03.
FP8_ATTENTION = 2**-4


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Largest absolute difference, relative to the largest value of ``theirs``; NaN anywhere gives NaN."""
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())


def ulps_apart(a: Tensor, b: Tensor) -> Tensor:
    """How many bf16 values lie from ``a`` to ``b``, element by element; -0.0 and 0.0 count as the same."""
    return (_rank(a) - _rank(b)).abs()


def ulp_of(x: Tensor) -> Tensor:
    """The step between neighbouring bf16 values at ``x``, in fp32: bf16 has 8 significant bits."""
    return torch.ldexp(torch.ones_like(x, dtype=torch.float32), torch.frexp(x.float().abs()).exponent - 8)


def _rank(x: Tensor) -> Tensor:
    bits = x.contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)
