"""x * 2**e = high + low, both float16: 22 significant bits in two operands that tensor cores multiply.

2**e is chosen on the device from a bound of |x|, so that the largest value lies below 2**15. A value down to 2**-16 of
the bound keeps all 22 bits; a smaller one loses them from below, and no error is larger than 2**-39 of the bound. A NaN
or an infinity gives NaN.

``SplitRows`` holds what ``conv3d`` reads that way: rows of channels, in which the neighbours of a pixel lie at fixed
distances, for the border is part of the rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from comfyui_h3.kernels._triton import tl, triton

TOP_EXPONENT = 15  # float16 ends at 2**16
MAX_EXPONENT = 113  # of 2**e: enough for every float32, and the reciprocal is a normal float32, too


@triton.jit
def scale_exponent(bound):
    """e, int32, for a float32 ``bound`` of |x|."""
    above = ((bound.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 126  # bound < 2**above
    return tl.minimum(tl.maximum(15 - above, -113), 113)


@triton.jit
def power_of_two(exponent):
    """2**exponent in float32, for int32 in [-126, 127]."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def store_split(rows_ptr, plane, offset, mask, x, PLANES: tl.constexpr):
    """Stores x, already scaled: its high half at ``offset``, its low half a ``plane`` of elements further on."""
    high = x.to(tl.float16)
    tl.store(rows_ptr + offset, high, mask=mask)
    if PLANES == 2:
        tl.store(rows_ptr + plane + offset, (x - high.to(tl.float32)).to(tl.float16), mask=mask)


def scale_exponent_ref(bound: Tensor) -> Tensor:
    above = torch.frexp(bound).exponent
    return (TOP_EXPONENT - above).clamp(-MAX_EXPONENT, MAX_EXPONENT)


def split_ref(x: Tensor, bound: Tensor, planes: int) -> Tensor:
    """x fp32 (...), bound of |x| that broadcasts against it -> (planes, ...) float16."""
    scaled = torch.ldexp(x, scale_exponent_ref(bound))
    high = scaled.half()
    return torch.stack([high, (scaled - high.float()).half()][:planes])


def join_ref(halves: Tensor, bound: Tensor) -> Tensor:
    """What ``split_ref`` was given, as far as the halves hold it, in fp32."""
    return torch.ldexp(halves.float().sum(0), -scale_exponent_ref(bound))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitRows:
    """F frames of a convolution's input. Output pixel (y, x) of frame f reads, at tap (dy, dx), the row
    ``f * frame_rows + y * row_width + x + tap_rows(dy, dx)``.

    rows: (planes, F * frame_rows, C) float16, planes 2 (high, low) or 1. bound: () float32, see above. height, width:
    of the convolution's output. taps: 27 for a stride of 2 (the rows of the four (y % 2, x % 2) of a frame lie behind
    each other), or 1, where the channels already are all that a pixel reads.
    """

    rows: Tensor
    bound: Tensor
    height: int
    width: int
    row_width: int
    frame_rows: int
    taps: int

    @property
    def planes(self) -> int:
        return self.rows.shape[0]

    @property
    def num_frames(self) -> int:
        return self.rows.shape[1] // self.frame_rows

    @property
    def channels(self) -> int:
        return self.rows.shape[2]

    def tap_rows(self, dy: int, dx: int) -> int:
        if self.taps == 1:
            return 0
        return (dy % 2 * 2 + dx % 2) * (self.frame_rows // 4) + dy // 2 * self.row_width + dx // 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitWeight:
    """A convolution's weight. rows: (planes, taps * N, C) float16, N output channels; bound: (N,) float32."""

    rows: Tensor
    bound: Tensor

    @classmethod
    def of(cls, weight: Tensor, planes: int) -> "SplitWeight":
        """weight: (N, C, 3, 3, 3) or (N, C) fp32."""
        num_out, num_in = weight.shape[:2]
        bound = weight.flatten(1).abs().amax(1)
        by_tap = weight.reshape(num_out, num_in, -1).movedim(2, 0)  # (taps, N, C)
        return cls(rows=split_ref(by_tap, bound[:, None], planes).flatten(1, 2).contiguous(), bound=bound)
