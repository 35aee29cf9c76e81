"""values[s] = e4m3(x[s] / scales[s]) with scales[s] = max|x[s]| / 448: rows in 8 bits, one float32 scale a row.

H3: S = rows of this rank (73,880 for 10 s at 1344x768 on one GPU), K = 7168 behind the attention, bfloat16.
Rounding: the scale, its reciprocal and the product are float32; the product is rounded to e4m3, to nearest, ties to
even. 448 is the largest e4m3 value; what the product passes it by is cut off. Equal to the reference bit for bit.
A row of zeros gets the smallest scale. A NaN or an infinity stays visible: its value is NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from comfyui_h3.kernels._triton import INTERPRETED, MISSING, VERSION, tl, triton
from comfyui_h3.kernels.dispatch import bf16_rows, use_triton
from comfyui_h3.kernels.launch import Launch, compute_capability, pick

E4M3_MAX = 448.0
E4M3_STEP = 1 / E4M3_MAX  # as a factor: torch divides by a number on the CPU, and multiplies by its reciprocal on a GPU
MIN_SCALE = 1e-12
TUPLES_VERSION = (3, 3)  # of Triton: the fused kernels collect the blocks of a row in a tuple
E4M3_CAPABILITY = (8, 9)  # the first GPUs that convert to e4m3 and multiply it

# One program computes one row, which it holds in registers; block is not used. Tried at 73,880 rows.
LAUNCH = {(9, 0): Launch(block=0, num_warps=8), None: Launch(block=0, num_warps=8)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedRows:
    """Rows s of ``values[s] * scales[s]``. values: (S, K) float8_e4m3fn; scales: (S,) float32."""

    values: Tensor
    scales: Tensor

    @classmethod
    def empty(cls, shape: Sequence[int], device: torch.device) -> "QuantizedRows":
        """To be written by a kernel."""
        values = torch.empty(shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        return cls(values=values, scales=torch.empty(shape[0], dtype=torch.float32, device=device))

    def dequantize(self) -> Tensor:
        """(S, K) float32."""
        return self.values.float() * self.scales[:, None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedHeads:
    """Heads n of ``values[:, n] * scales[n]``. values: (S, N, H) float8_e4m3fn; scales: (N,) float32."""

    values: Tensor
    scales: Tensor

    @classmethod
    def empty(cls, shape: Sequence[int], device: torch.device) -> "QuantizedHeads":
        """To be written by a kernel."""
        values = torch.empty(shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        return cls(values=values, scales=torch.empty(shape[1], dtype=torch.float32, device=device))

    def dequantize(self) -> Tensor:
        """(S, N, H) float32."""
        return self.values.float() * self.scales[:, None]


def quantize_fp8_ref(x: Tensor) -> QuantizedRows:
    x = x.float()
    scales = (x.abs().amax(-1) * E4M3_STEP).clamp(min=MIN_SCALE)
    values = (x * (1 / scales)[:, None]).clamp(-E4M3_MAX, E4M3_MAX)
    return QuantizedRows(values=values.to(torch.float8_e4m3fn), scales=scales)


@triton.jit
def e4m3_bits(x):
    """x: float32 -> the bits of the e4m3 value, uint8: to nearest even, saturating, NaN for NaN. Integer arithmetic."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # The exponent's bias is 127 there and 7 here, the mantissa 23 and 3 bits wide.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 the step is 2**-9: that of float32 at 2**14, so the addition rounds.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, small, tl.minimum(normal, 0x7E))
    return (tl.where(x != x, 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def e4m3_ptx(x):
    """The same by the conversion that NVIDIA GPUs have from compute capability 8.9 on. Of four values at least."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }""",
        "=r,r,r,r,r",
        [x],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )


e4m3 = e4m3_bits if INTERPRETED or torch.version.cuda is None else e4m3_ptx


@triton.jit
def row_scale(amax):
    """Scale of a row whose largest magnitude is ``amax``."""
    return tl.maximum(amax * (1 / 448), 1e-12)


@triton.jit
def row_reciprocal(scale):
    """What the values of a row are multiplied by."""
    return tl.div_rn(1.0, scale)


@triton.jit
def _quantize_fp8_kernel(values_ptr, scales_ptr, x_ptr, x_stride, K, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # row * stride may pass 2**31
    col = tl.arange(0, BLOCK)
    mask = col < K
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
    scale = row_scale(tl.max(tl.abs(x), axis=0))
    tl.store(values_ptr + row * K + col, e4m3(x * row_reciprocal(scale)), mask=mask)
    tl.store(scales_ptr + row, scale)


def e4m3_problem(device: torch.device) -> str | None:
    """What keeps a kernel on ``device`` from giving e4m3, or None."""
    if MISSING is None and VERSION < TUPLES_VERSION:
        return (
            f"triton {VERSION[0]}.{VERSION[1]} cannot compile them, which takes {TUPLES_VERSION[0]}.{TUPLES_VERSION[1]}"
        )
    if INTERPRETED or device.type != "cuda" or compute_capability(device) >= E4M3_CAPABILITY:
        return None
    return "the GPU has no e4m3, which takes compute capability 8.9"


def quantize_fp8(x: Tensor) -> QuantizedRows:
    """x: (S, K), rows may be strided -> the same rows, quantised."""
    problem = bf16_rows(x=x) or e4m3_problem(x.device)
    if not use_triton("quantize_fp8", x.device, problem):
        return quantize_fp8_ref(x)
    num_rows, dim = x.shape
    launch = pick(LAUNCH, x.device)
    out = QuantizedRows.empty(x.shape, x.device)
    with torch.cuda.device_of(x):
        _quantize_fp8_kernel[(num_rows,)](
            out.values.view(torch.uint8), out.scales, x, x.stride(0), dim,
            BLOCK=max(4, triton.next_power_of_2(dim)), num_warps=launch.num_warps,
        )  # fmt: skip
    return out
