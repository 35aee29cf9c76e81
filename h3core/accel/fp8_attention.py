"""FlashAttention 3 in 8 bits: queries, keys and values in e4m3, and the probabilities with them.

A named approximation, never on by itself. It needs no pass to find the size of queries and keys, which their norm
bounds. Values are centred, as what all of them share would be lost in the sums of tensor cores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from comfyui_h3.kernels.centred_heads_fp8 import add_mean, centred_heads_fp8
from comfyui_h3.kernels.qk_norm_rope_fp8 import qk_norm_rope_fp8
from comfyui_h3.kernels.quantize_fp8 import QuantizedHeads


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Attention:
    """An ``AttentionFn`` over the heads that its own ``norm_rope`` gives.

    flash: ``flash_attn_func`` of FlashAttention 3, over (1, S, N, H).
    """

    flash: Callable[..., Tensor]

    def norm_rope(
        self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
    ) -> tuple[QuantizedHeads, QuantizedHeads]:
        """As ``qk_norm_rope``, quantised."""
        return qk_norm_rope_fp8(q, k, q_weight, k_weight, cos, sin, eps)

    def __call__(self, q: Any, k: Any, v: Tensor) -> Tensor:
        """q, k: (S, N, H) as ``norm_rope`` gives them; v: (S, N, H) bfloat16 -> (S, N, H) bfloat16.

        Where q and k are bfloat16, so is the attention: of the token refiner, whose few rows run once a request.
        """
        if isinstance(q, Tensor):
            return unbatched(self.flash(q[None], k[None], v[None]))
        values, mean = centred_heads_fp8(v)
        out = self.flash(
            q.values[None],
            k.values[None],
            values.values[None],
            q_descale=q.scales[None],
            k_descale=k.scales[None],
            v_descale=values.scales[None],
        )
        return add_mean(unbatched(out), mean)


def unbatched(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    """What a ``flash_attn_func`` gives for one sequence, (1, S, N, H) -> (S, N, H); some add the log-sum-exp to it."""
    return (out[0] if isinstance(out, tuple) else out)[0]
