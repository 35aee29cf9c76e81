"""y = down(v), v = u + sin(e**alpha * u)**2 / (e**beta + 1e-9), u = up(x): the alias-free SnakeBeta of the vocoder.

With x of length n, clamped at its ends, and 12 taps f for the way up and g for the way down:

    u[2t]     = 2 * sum(x[t + j] * f[5 - 2j] for j in -3..2)
    u[2t + 1] = 2 * sum(x[t + j] * f[6 - 2j] for j in -2..3)
    y[t]      = sum(g[k] * v[2t + k - 5] for k in 0..11)       clamped on v, not on x

H3: x (2, C, n) float32 for C = 512, 256, ... 8 and n = 5, 25, 50, ... 800 times the latents (405 for 10 s), 127 times
in one decode. Each channel has its own alpha and beta.
Rounding: float32 throughout, the sums in another order than the reference's. The square of the sine is within 3e-7
while its argument is below 1.3e7; beyond, where float32 has no fraction of a radian left, it counts as 0.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from comfyui_h3.kernels._triton import tl, triton
from comfyui_h3.kernels.dispatch import float32_signal, use_triton
from comfyui_h3.kernels.launch import Launch, pick

NUM_TAPS = 12
RUN = 16  # outputs in a row of one lane: more of them repeat less of v, fewer keep more lanes busy

# block: lanes of one program.
LAUNCH = {(9, 0): Launch(block=128, num_warps=4), None: Launch(block=128, num_warps=4)}


def snake_beta_ref(x: Tensor, alpha: Tensor, beta: Tensor, up: Tensor, down: Tensor) -> Tensor:
    channels = x.shape[1]
    alpha, beta = alpha.exp()[:, None], beta.exp()[:, None]
    u = F.pad(x, (5, 5), mode="replicate")
    u = 2 * F.conv_transpose1d(u, up.expand(channels, 1, NUM_TAPS), stride=2, groups=channels)
    u = u[..., 15:-15]
    v = u + (1.0 / (beta + 1e-9)) * torch.sin(u * alpha).pow(2)
    v = F.pad(v, (5, 6), mode="replicate")
    return F.conv1d(v, down.expand(channels, 1, NUM_TAPS), stride=2, groups=channels)


@triton.jit
def _exp(x):
    """e**x of float32 to its last bit or two, as the argument of a sine takes; the device's own has more wrong."""
    x = tl.minimum(tl.maximum(x, -87.0), 89.0)  # from the smallest normal number to infinity
    power = (x * 1.4426950408889634 + 12582912.0) - 12582912.0  # 1.5 * 2**23: adding it rounds to an integer
    r = (x - power * 0.693359375) - power * -2.12194440e-4
    series = 1.0 + r * (1.0 + r * (0.5 + r * (1 / 6 + r * (1 / 24 + r * (1 / 120 + r * (1 / 720 + r * (1 / 5040)))))))
    return series * ((power.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _sine_squared(z):
    """sin(z)**2: z less its nearest multiple of pi, the three parts of which multiply exactly, then a polynomial."""
    turns = (z * 0.31830988618379067 + 12582912.0) - 12582912.0
    r = tl.fma(turns, -3.140625, z)
    r = tl.fma(turns, -0.0009675025939941406, r)
    r = tl.fma(turns, -1.5099580252808664e-07, r)
    r = tl.where(tl.abs(z) < 1.3e7, r, z * 0.0)  # a NaN stays one, an infinity becomes one
    s = r * r
    sine = r + r * (s * (-0.16666657 + s * (0.008333016 + s * (-0.00019806546 + s * 2.5999029e-06))))
    return sine * sine


@triton.jit
def _snake(u, frequency, amplitude):
    return u + amplitude * _sine_squared(u * frequency)


@triton.jit
def _six(ptr, scale):
    """Six taps, every second one."""
    return (
        scale * tl.load(ptr), scale * tl.load(ptr + 2), scale * tl.load(ptr + 4),
        scale * tl.load(ptr + 6), scale * tl.load(ptr + 8), scale * tl.load(ptr + 10),
    )  # fmt: skip


@triton.jit(do_not_specialize=["n", "channels"])  # one kernel for all lengths and widths: compiling it takes seconds
def _snake_beta_kernel(
    out_ptr, x_ptr, alpha_ptr, beta_ptr, up_ptr, down_ptr, n, channels, RUN: tl.constexpr, BLOCK: tl.constexpr
):
    """x, out: (B, n, channels). A lane computes RUN outputs of one channel, each sample of v once for all of them."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = lane % channels
    start = lane // channels * RUN
    live = start < n
    last = n - 1
    item = tl.program_id(1).to(tl.int64) * n * channels
    x_ptr += item + channel
    out_ptr += item + channel
    frequency = _exp(tl.load(alpha_ptr + channel))
    amplitude = tl.div_rn(1.0, _exp(tl.load(beta_ptr + channel)) + 1e-9)
    f0, f2, f4, f6, f8, f10 = _six(up_ptr, 2.0)
    f1, f3, f5, f7, f9, f11 = _six(up_ptr + 1, 2.0)
    g0, g2, g4, g6, g8, g10 = _six(down_ptr, 1.0)
    g1, g3, g5, g7, g9, g11 = _six(down_ptr + 1, 1.0)

    # At each s: x0 ... x6 are x[s - 3] ... x[s + 3]; even0 ... even5 are v[2(s - 5)] ... v[2s]; odd0 ... odd6 are
    # v[2(s - 6) + 1] ... v[2s + 1]. What is not computed yet is not used.
    x1 = tl.load(x_ptr + tl.minimum(tl.maximum(start - 5, 0), last) * channels, mask=live, other=0.0)
    x2 = tl.load(x_ptr + tl.minimum(tl.maximum(start - 4, 0), last) * channels, mask=live, other=0.0)
    x3 = tl.load(x_ptr + tl.minimum(tl.maximum(start - 3, 0), last) * channels, mask=live, other=0.0)
    x4 = tl.load(x_ptr + tl.minimum(tl.maximum(start - 2, 0), last) * channels, mask=live, other=0.0)
    x5 = tl.load(x_ptr + tl.minimum(tl.maximum(start - 1, 0), last) * channels, mask=live, other=0.0)
    x0 = x1
    even1, even2, even3, even4, even5 = x0, x0, x0, x0, x0
    odd1, odd2, odd3, odd4, odd5, odd6 = x0, x0, x0, x0, x0, x0
    for i in tl.static_range(RUN + 6):
        s = start + (i - 3)
        x6 = tl.load(x_ptr + tl.minimum(start + i, last) * channels, mask=live, other=0.0)
        even = _snake(x0 * f11 + x1 * f9 + x2 * f7 + x3 * f5 + x4 * f3 + x5 * f1, frequency, amplitude)
        odd = _snake(x1 * f10 + x2 * f8 + x3 * f6 + x4 * f4 + x5 * f2 + x6 * f0, frequency, amplitude)
        even0, even1, even2, even3, even4 = even1, even2, even3, even4, even5
        odd0, odd1, odd2, odd3, odd4, odd5 = odd1, odd2, odd3, odd4, odd5, odd6
        even5 = tl.where(s < n, even, odd5)  # after the end, the last sample of v
        odd6 = tl.where(s < n, odd, odd5)
        if i == 3:  # before the beginning, the first sample of v
            even3 = tl.where(start == 0, even5, even3)
            even4 = tl.where(start == 0, even5, even4)
            odd3 = tl.where(start == 0, even5, odd3)
            odd4 = tl.where(start == 0, even5, odd4)
            odd5 = tl.where(start == 0, even5, odd5)
        if i >= 6:
            y = even0 * g1 + even1 * g3 + even2 * g5 + even3 * g7 + even4 * g9 + even5 * g11
            y += odd0 * g0 + odd1 * g2 + odd2 * g4 + odd3 * g6 + odd4 * g8 + odd5 * g10
            tl.store(out_ptr + (s - 3) * channels, y, mask=s - 3 < n)
        x0, x1, x2, x3, x4, x5 = x1, x2, x3, x4, x5, x6


def snake_beta(x: Tensor, alpha: Tensor, beta: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """x: (B, C, n); alpha, beta: (C,) logarithms; up, down: 12 taps -> (B, C, n).

    The kernel's result has its channels innermost in memory, which it wants of x as well: another x is copied.
    """
    problem = float32_signal(x, alpha=alpha, beta=beta, up=up, down=down)
    if not use_triton("snake_beta", x.device, problem):
        return snake_beta_ref(x, alpha, beta, up, down)
    num_items, channels, n = x.shape
    launch = pick(LAUNCH, x.device)
    x = x.mT.contiguous()
    out = torch.empty_like(x)
    grid = (triton.cdiv(channels * triton.cdiv(n, RUN), launch.block), num_items)
    with torch.cuda.device_of(x):
        _snake_beta_kernel[grid](
            out, x, alpha.contiguous(), beta.contiguous(), up.contiguous(), down.contiguous(), n, channels,
            RUN=RUN, BLOCK=launch.block, num_warps=launch.num_warps,
        )  # fmt: skip
    return out.mT
