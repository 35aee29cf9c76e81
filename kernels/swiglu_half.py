"""out[s] = silu(gate_value[s, :F]) * gate_value[s, F:]: the activation of the video decoder's MLP, gate half first.

H3: S = rows of some tiles (1,797 each), F = 8192, float16.
Rounding: silu is rounded to fp16 before the product, as in eager PyTorch: equal to the reference bit for bit.
"""

import torch
from torch import Tensor

from comfyui_h3.kernels._triton import INTERPRETED, libdevice, tl, triton
from comfyui_h3.kernels.dispatch import rows_of, use_triton
from comfyui_h3.kernels.launch import Launch, pick

LAUNCH = {(9, 0): Launch(block=2048, num_warps=4), None: Launch(block=2048, num_warps=4)}


def swiglu_half_ref(gate_value: Tensor) -> Tensor:
    gate, value = gate_value.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * value


@triton.jit
def _exp_approx(x):
    return tl.exp(x)


@triton.jit
def _exp_libdevice(x):
    """CUDA's own ``expf``, which PyTorch's silu calls: every float16 gate gives the same silu."""
    return libdevice.exp(x)


_exp = _exp_approx if INTERPRETED or torch.version.cuda is None else _exp_libdevice


@triton.jit
def _swiglu_half_kernel(out_ptr, gate_value_ptr, gate_value_stride, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # row * stride may pass 2**31
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = col < F
    gate_row = gate_value_ptr + row * gate_value_stride
    gate = tl.load(gate_row + col, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(gate_row + F + col, mask=mask, other=0.0).to(tl.float32)
    silu = tl.div_rn(gate, 1.0 + _exp(-gate)).to(tl.float16)
    tl.store(out_ptr + row * F + col, (silu.to(tl.float32) * value).to(tl.float16), mask=mask)


def swiglu_half(gate_value: Tensor) -> Tensor:
    """gate_value: (..., 2 * F) -> (..., F) in its dtype; the kernel runs for dense rows in float16."""
    problem = rows_of(torch.float16, gate_value=gate_value)
    if problem is None and not gate_value.is_contiguous():
        problem = "gate_value is strided"
    if not use_triton("swiglu_half", gate_value.device, problem):
        return swiglu_half_ref(gate_value)
    *shape, width = gate_value.shape
    dim = width // 2
    launch = pick(LAUNCH, gate_value.device)
    out = torch.empty((*shape, dim), dtype=gate_value.dtype, device=gate_value.device)
    grid = (out.numel() // dim, triton.cdiv(dim, launch.block))
    with torch.cuda.device_of(gate_value):
        # Without contraction a rounded product stays one.
        _swiglu_half_kernel[grid](
            out, gate_value, width, dim, BLOCK=launch.block, num_warps=launch.num_warps, enable_fp_fusion=False
        )
    return out
