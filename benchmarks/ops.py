"""Time of each fused operation at H3 shapes: Triton kernel, torch reference, and the floor of the bytes it must move.

    python _bootstrap.py benchmarks.ops --op all

Every kernel is compared with its reference on the timed inputs first. A figure is the median over replays of one CUDA
graph of several calls on rotating inputs, which together are larger than the cache, divided by the calls: GPU time
without launch gaps. The floor is the fewest bytes the operation can move, at the rate of a device copy in the same run.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comfyui_h3.benchmarks.record import write_record
from comfyui_h3.kernels.dispatch import backend, triton_problem
from comfyui_h3.kernels.gate_residual import gate_residual
from comfyui_h3.kernels.gate_residual_norm import gate_residual_norm
from comfyui_h3.kernels.norm_modulate import norm_modulate
from comfyui_h3.kernels.qk_norm_rope import qk_norm_rope
from comfyui_h3.kernels.swiglu import swiglu
from comfyui_h3.tests.tolerances import NORM_DIFFERENT_SHARE

# Rows of a 5 s clip at 1344x768 (37,296 video, 414 audio, 66 text): on one GPU, and its share of 8.
SHARED_ROWS = 4_722
ROWS = (SHARED_ROWS, 37_776)
D, N, H, R, F, M = 5376, 56, 128, 96, 14336, 6
EPS = 1e-5
WARM_REPLAYS = 50  # a GPU that was idle takes some milliseconds to its full clock
ROTATED_BYTES = 512 << 20  # inputs to rotate over: several times the largest cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation: how to call it, the bytes that it must move, and how exactly it must match its reference.

    make(num_rows, generator): the arguments of one call. num_bytes(num_rows): inputs read and outputs written once.
    different_share: elements that may differ from the reference.
    """

    function: Callable[..., Any]
    make: Callable[[int, torch.Generator], tuple[Any, ...]]
    num_bytes: Callable[[int], int]
    different_share: float


def randn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, device=generator.device, dtype=torch.bfloat16, generator=generator)


def make_index(num_rows: int, generator: torch.Generator) -> Tensor:
    return torch.randint(M, (num_rows,), device=generator.device, dtype=torch.int32, generator=generator)


def make_norm_modulate(num_rows: int, generator: torch.Generator) -> tuple[Any, ...]:
    shift, scale, *_ = randn(generator, M, 6 * D).chunk(6, dim=-1)
    return randn(generator, num_rows, D), randn(generator, D), scale, shift, make_index(num_rows, generator), EPS


def make_gate_residual(num_rows: int, generator: torch.Generator) -> tuple[Any, ...]:
    gate = randn(generator, M, 6 * D).chunk(6, dim=-1)[2]
    return randn(generator, num_rows, D), randn(generator, num_rows, D), gate, make_index(num_rows, generator)


def make_gate_residual_norm(num_rows: int, generator: torch.Generator) -> tuple[Any, ...]:
    x, o, gate, index = make_gate_residual(num_rows, generator)
    shift, scale, *_ = randn(generator, M, 6 * D).chunk(6, dim=-1)
    return x, o, gate, randn(generator, D), scale, shift, index, EPS


def make_swiglu(num_rows: int, generator: torch.Generator) -> tuple[Any, ...]:
    # The result replaces the gate: with this up it is about the gate again, however often.
    gate = randn(generator, num_rows, F)
    return (torch.cat((gate, 1 + torch.exp(-gate)), dim=-1),)


def make_qk_norm(num_rows: int, generator: torch.Generator, rotary_dim: int = 0) -> tuple[Any, ...]:
    q, k, _ = randn(generator, num_rows, 3, N, H).unbind(1)
    angle = 100 * torch.randn(num_rows, rotary_dim // 2, device=generator.device, generator=generator)
    return q, k, randn(generator, H), randn(generator, H), angle.cos().bfloat16(), angle.sin().bfloat16(), EPS


def make_qk_norm_rope(num_rows: int, generator: torch.Generator) -> tuple[Any, ...]:
    return make_qk_norm(num_rows, generator, R)


OPS = {
    "norm_modulate": Op(
        function=norm_modulate,
        make=make_norm_modulate,
        num_bytes=lambda rows: 2 * (2 * rows * D + D + 2 * M * D) + 4 * rows,
        different_share=NORM_DIFFERENT_SHARE,
    ),
    "gate_residual": Op(
        function=gate_residual,
        make=make_gate_residual,
        num_bytes=lambda rows: 2 * (3 * rows * D + M * D) + 4 * rows,
        different_share=0.0,
    ),
    "gate_residual_norm": Op(
        function=gate_residual_norm,
        make=make_gate_residual_norm,
        num_bytes=lambda rows: 2 * (4 * rows * D + D + 3 * M * D) + 4 * rows,
        different_share=NORM_DIFFERENT_SHARE,
    ),
    "swiglu": Op(function=swiglu, make=make_swiglu, num_bytes=lambda rows: 2 * 3 * rows * F, different_share=0.0),
    "qk_norm": Op(
        function=qk_norm_rope,
        make=make_qk_norm,
        num_bytes=lambda rows: 2 * (4 * rows * N * H + 2 * H),
        different_share=NORM_DIFFERENT_SHARE,
    ),
    "qk_norm_rope": Op(
        function=qk_norm_rope,
        make=make_qk_norm_rope,
        num_bytes=lambda rows: 2 * (4 * rows * N * H + 2 * H + rows * R),
        different_share=NORM_DIFFERENT_SHARE,
    ),
}


def time_us(calls: Sequence[Callable[[], object]], num_samples: int) -> float:
    """Median microseconds of one of ``calls``, from replays of a CUDA graph of all of them."""
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(WARM_REPLAYS):
        graph.replay()
    return median_us(graph.replay, num_samples) / len(calls)


def copy_tb_per_s(num_samples: int, device: torch.device) -> float:
    """Bytes read and written per second by a copy of 2 GiB, without a graph: a graph makes a slower transfer of it."""
    source = torch.ones(1 << 30, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    for _ in range(3):
        target.copy_(source)
    us = median_us(lambda: target.copy_(source), num_samples)
    return 2 * source.numel() * source.element_size() / us / 1e6


def median_us(run: Callable[[], object], num_samples: int) -> float:
    """Median microseconds that the GPU spends from the start to the end of ``run``."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(num_samples)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) * 1e3


def check(name: str, op: Op, arguments: tuple[Any, ...]) -> None:
    """Raise where the kernel differs from its reference in more elements than it may."""
    with backend("torch"):
        expected = op.function(*arguments)
    with backend("triton"):  # second, as it may write over its arguments
        out = op.function(*arguments)
    if isinstance(out, Tensor):
        out, expected = (out,), (expected,)
    for got, wanted in zip(out, expected, strict=True):
        share = (got != wanted).float().mean().item()
        if share > op.different_share or not got.isfinite().all():
            raise SystemExit(f"{name}: {share:.2e} of the elements differ from the reference; nothing is timed")


def measure(name: str, num_rows: int, copy_rate: float, num_samples: int, device: torch.device) -> dict[str, float]:
    op = OPS[name]
    generator = torch.Generator(device).manual_seed(0)
    num_bytes = op.num_bytes(num_rows)
    sets = [op.make(num_rows, generator) for _ in range(max(2, -(-ROTATED_BYTES // num_bytes)))]
    check(name, op, sets[0])
    figures = {}
    for implementation in ("triton", "torch"):
        with backend(implementation):
            calls = [lambda arguments=arguments: op.function(*arguments) for arguments in sets]
            figures[f"{implementation}_us"] = time_us(calls, num_samples)
    figures["floor_us"] = num_bytes / copy_rate / 1e6
    figures["speedup"] = figures["torch_us"] / figures["triton_us"]
    figures["share_of_copy_rate"] = figures["floor_us"] / figures["triton_us"]
    return {f"{name}_{num_rows}.{key}": value for key, value in figures.items()}


FIELD_NAMES = {  # what the operations are called in reports of other engines, which time them at SHARED_ROWS
    "norm_modulate": "scale_shift",
    "gate_residual": "gated_residual",
    "swiglu": "swiglu",
    "qk_norm": "qk_norm",
    "qk_norm_rope": "qk_norm_rope",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.ops", description=__doc__.splitlines()[0])
    parser.add_argument("--op", choices=["all", *OPS], default="all")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="rows S (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=30, help="timed replays, of which the median is taken")
    parser.add_argument("--out", type=Path, help="folder for the JSON (default: benchmarks/results)")
    parser.add_argument("--commit", help="commit of the code, where it runs from a copy without git")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda":
        raise SystemExit("benchmarks.ops times GPU kernels, and this machine has no CUDA device; nothing was measured")
    if (problem := triton_problem(device)) is not None:
        raise SystemExit(f"benchmarks.ops cannot time the kernels: {problem}")

    with torch.inference_mode():
        copy_rate = copy_tb_per_s(options.samples, device)
        figures = {"copy.tb_per_s": copy_rate}
        for name in OPS if options.op == "all" else [options.op]:
            for num_rows in options.rows:
                figures |= measure(name, num_rows, copy_rate, options.samples, device)
    for name, field_name in FIELD_NAMES.items():
        if f"{name}_{SHARED_ROWS}.triton_us" in figures:
            figures[f"ops_us.{field_name}"] = figures[f"{name}_{SHARED_ROWS}.triton_us"]
    for key, value in figures.items():
        print(f"{key:40} {value:10.3f}")
    name = "ops" if options.op == "all" else f"ops_{options.op}"
    shapes = {"rows": list(options.rows), "D": D, "N": N, "H": H, "R": R, "F": F, "M": M, "dtype": "bfloat16"}
    print(write_record(name, figures, shapes, device=device, out=options.out, commit=options.commit))


if __name__ == "__main__":
    main()
