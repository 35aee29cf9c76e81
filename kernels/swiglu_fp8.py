"""e4m3 rows of silu(gate_up[s, :F]) * gate_up[s, F:]: the activation of the DiT's MLP, as an FP8 linear reads it.

H3: S = rows of this rank (73,880 for 10 s at 1344x768 on one GPU), F = 14336, bfloat16.
Rounding: that of ``swiglu``, then that of ``quantize_fp8``: equal to the two in a row, bit for bit.
"""

import torch
from torch import Tensor

from comfyui_h3.kernels._triton import tl, triton
from comfyui_h3.kernels.dispatch import bf16_rows, use_triton
from comfyui_h3.kernels.launch import Launch, pick
from comfyui_h3.kernels.quantize_fp8 import (
    QuantizedRows,
    e4m3,
    e4m3_problem,
    quantize_fp8_ref,
    row_reciprocal,
    row_scale,
)
from comfyui_h3.kernels.rounding import mul_bf16, to_bf16
from comfyui_h3.kernels.swiglu import swiglu_ref

# block: columns computed at a time; a row is held in registers until its scale is known. Tried at 73,880 rows.
LAUNCH = {(9, 0): Launch(block=2048, num_warps=8), None: Launch(block=2048, num_warps=8)}


def swiglu_fp8_ref(gate_up: Tensor) -> QuantizedRows:
    return quantize_fp8_ref(swiglu_ref(gate_up))


@triton.jit
def _swiglu_fp8_kernel(
    values_ptr, scales_ptr, gate_up_ptr, gate_up_stride, F: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)  # row * stride may pass 2**31
    gate_row = gate_up_ptr + row * gate_up_stride
    largest = tl.zeros([BLOCK], tl.float32)
    blocks = ()
    for block in tl.static_range(NUM_BLOCKS):
        col = block * BLOCK + tl.arange(0, BLOCK)
        mask = col < F
        gate = tl.load(gate_row + col, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_row + F + col, mask=mask, other=0.0)
        # The fast division is off by 2 units of float32 at most, and for none of the bf16 gates across a rounding.
        out = mul_bf16(to_bf16(gate / (1.0 + tl.exp(-gate))), up)
        largest = tl.maximum(largest, tl.abs(out.to(tl.float32)))
        blocks = blocks + (out,)  # type: ignore[assignment]  # noqa: RUF005
    scale = row_scale(tl.max(largest, axis=0))
    reciprocal = row_reciprocal(scale)
    for block in tl.static_range(NUM_BLOCKS):
        col = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(values_ptr + row * F + col, e4m3(blocks[block].to(tl.float32) * reciprocal), mask=col < F)
    tl.store(scales_ptr + row, scale)


def swiglu_fp8(gate_up: Tensor) -> QuantizedRows:
    """gate_up: (S, 2 * F), rows may be strided -> (S, F) quantised."""
    problem = bf16_rows(gate_up=gate_up) or e4m3_problem(gate_up.device)
    if not use_triton("swiglu_fp8", gate_up.device, problem):
        return swiglu_fp8_ref(gate_up)
    num_rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
    launch = pick(LAUNCH, gate_up.device)
    out = QuantizedRows.empty((num_rows, dim), gate_up.device)
    with torch.cuda.device_of(gate_up):
        _swiglu_fp8_kernel[(num_rows,)](
            out.values.view(torch.uint8), out.scales, gate_up, gate_up.stride(0),
            F=dim, NUM_BLOCKS=triton.cdiv(dim, launch.block), BLOCK=launch.block, num_warps=launch.num_warps,
        )  # fmt: skip
    return out
