"""x @ weight.T + bias of float32 on tensor cores: each factor is the sum of two float16 halves.

With x = xh + xl and w = wh + wl the sum is of xl * wh + xh * wl + xh * wh; what is left out, xl * wl, is 2**-22 of a
product. Tensor cores cut off, rather than round, what they add up, so no sum inside them is longer than BLOCK_K
products: each is added to the whole in registers, by rounding float32 additions.

H3: the output projection of the video decoder, S = rows of some tiles (1,797 each), K = 2048, N = 3072.
Rounding: within a few steps of float32 of the reference, which adds up in another order.
"""

import torch
from torch import Tensor

from comfyui_h3.kernels._triton import TensorDescriptor, tl, triton
from comfyui_h3.kernels.dispatch import (
    log_reference,
    rows_of,
    tensor_core_problem,
    triton_problem,
    use_triton,
)

BLOCK_M, BLOCK_N, BLOCK_K = 128, 128, 64
GROUP = 8  # row blocks whose programs run together and share columns in the cache
MAX_VALUE = 2.0**15  # of the larger half


def split_linear_ref(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


@triton.jit
def _split_linear_kernel(
    out_ptr, x_halves, weight_halves, bias_ptr, unit_ptr, num_rows,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    num_blocks_m = tl.cdiv(num_rows, BLOCK_M)
    group_size: tl.constexpr = GROUP * (N // BLOCK_N)
    first = tl.program_id(0) // group_size * GROUP
    in_group = tl.minimum(num_blocks_m - first, GROUP)
    m_start = (first + tl.program_id(0) % group_size % in_group) * BLOCK_M
    n_start = tl.program_id(0) % group_size // in_group * BLOCK_N
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        x_high = x_halves.load([m_start, k])
        x_low = x_halves.load([num_rows + m_start, k])
        weight_high = weight_halves.load([n_start, k]).T
        weight_low = weight_halves.load([N + n_start, k]).T
        part = tl.dot(x_low, weight_high)
        part = tl.dot(x_high, weight_low, part)
        part = tl.dot(x_high, weight_high, part)
        acc += part
    row = m_start + tl.arange(0, BLOCK_M)[:, None]
    col = n_start + tl.arange(0, BLOCK_N)[None, :]
    out = acc * tl.load(unit_ptr) + tl.load(bias_ptr + col)
    tl.store(out_ptr + row.to(tl.int64) * N + col, out, mask=row < num_rows)


def split_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x: (..., K); weight: (N, K); bias: (N,), all float32 -> (..., N) float32.

    The kernel is for Hopper GPUs and newer, which load tiles by tensor descriptors, and for N and K that are multiples
    of its blocks; elsewhere the reference runs.
    """
    if (lack := _no_kernel(weight)) is not None:
        log_reference("split_linear", lack)
        return split_linear_ref(x, weight, bias)
    if not use_triton("split_linear", x.device, _problem(x, weight, bias)):
        return split_linear_ref(x, weight, bias)
    *shape, width = x.shape
    num_outputs = weight.shape[0]
    x_halves, x_unit = _halves(x.view(-1, width))
    weight_halves, weight_unit = _halves(weight)
    num_rows = len(x_halves) // 2
    out = torch.empty((*shape, num_outputs), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(num_rows, BLOCK_M) * (num_outputs // BLOCK_N),)
    with torch.cuda.device_of(x):
        _split_linear_kernel[grid](
            out, TensorDescriptor.from_tensor(x_halves, [BLOCK_M, BLOCK_K]),
            TensorDescriptor.from_tensor(weight_halves, [BLOCK_N, BLOCK_K]), bias, x_unit * weight_unit, num_rows,
            N=num_outputs, K=width, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, GROUP=GROUP,
            num_warps=8, num_stages=3,
        )  # fmt: skip
    return out


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (S, K) -> (2 * S, K) float16, the larger halves first, and the power of 2 that x was divided by, on the device.

    It brings the largest value near the end of float16, so that small halves keep their bits.
    """
    unit = torch.exp2(torch.frexp(torch.linalg.vector_norm(x, torch.inf) / MAX_VALUE).exponent.float())
    scaled = x / unit
    halves = torch.empty((2, *x.shape), dtype=torch.float16, device=x.device)
    halves[0] = scaled
    halves[1] = scaled - halves[0]
    return halves.flatten(0, 1), unit


def _no_kernel(weight: Tensor) -> str | None:
    """Why there is none for this size or GPU, which insisting on kernels does not change; None where there is one."""
    if weight.shape[0] % BLOCK_N or weight.shape[1] % BLOCK_K:
        return f"the weight is {tuple(weight.shape)}, not whole blocks of {BLOCK_N} x {BLOCK_K}"
    return None if triton_problem(weight.device) else tensor_core_problem(weight.device)


def _problem(x: Tensor, weight: Tensor, bias: Tensor) -> str | None:
    """What keeps the tensors from the kernel, or None."""
    if problem := rows_of(torch.float32, x=x, weight=weight, bias=bias):
        return problem
    return None if x.is_contiguous() and weight.is_contiguous() else "x or weight is strided"
