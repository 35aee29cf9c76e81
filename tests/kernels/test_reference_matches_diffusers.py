"""The references against one block of the public model, in its own chain of roundings."""

import pytest
import torch

from comfyui_h3.kernels.gate_residual import gate_residual_ref
from comfyui_h3.kernels.norm_modulate import norm_modulate_ref
from comfyui_h3.kernels.qk_norm_rope import qk_norm_rope_ref
from comfyui_h3.kernels.swiglu import swiglu_ref

oracle = pytest.importorskip("diffusers.models.transformers.transformer_minimax_h3")

pytestmark = pytest.mark.oracle

S, D, N, H, F, EPS = 23, 64, 4, 32, 96, 1e-5


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def run(request):
    """One block on random weights, and what went into and out of its parts."""
    dtype = request.param
    torch.manual_seed(0)
    block = oracle.MiniMaxH3TransformerBlock(D, N, H, F, time_embed_dim=40, norm_eps=EPS, qk_norm_eps=EPS).to(dtype)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    seen = {}

    def record(name, module):
        module.register_forward_hook(lambda _, args, out: seen.__setitem__(name, (args[0], out)))

    for name in ("norm1", "norm2", "attn", "ff", "attn.norm_q", "attn.norm_k", "ff.net.0"):
        record(name, block.get_submodule(name))
    seen["temb"] = torch.randn(2, 40)
    seen["index"] = torch.randint(6, (S,), dtype=torch.int32)
    seen["rope"] = oracle.MiniMaxH3RotaryPosEmbed(rope_freq_dim=4)(torch.randint(50, (S, 3)))
    with torch.no_grad():
        x = torch.randn(1, S, D, dtype=dtype)
        seen["out"] = block(x, seen["temb"], seen["index"], seen["rope"])
        seen["table"] = block.adaln_proj(seen["temb"])
    seen["block"] = block
    return seen


def test_norm_modulate(run):
    shift1, scale1, _, shift2, scale2, _ = run["table"]
    for norm, part, scale, shift in (("norm1", "attn", scale1, shift1), ("norm2", "ff", scale2, shift2)):
        weight = run["block"].get_submodule(norm).weight
        out = norm_modulate_ref(run[norm][0][0], weight, scale, shift, run["index"], EPS)
        assert torch.equal(out, run[part][0][0])


def test_gate_residual(run):
    _, _, gate1, _, _, gate2 = run["table"]
    middle = run["norm2"][0][0]
    assert torch.equal(gate_residual_ref(run["norm1"][0][0], run["attn"][1][0], gate1, run["index"]), middle)
    assert torch.equal(gate_residual_ref(middle, run["ff"][1][0], gate2, run["index"]), run["out"][0])


def test_swiglu(run):
    h, out = run["ff.net.0"]
    up, gate = run["block"].ff.net[0].proj(h)[0].chunk(2, dim=-1)  # diffusers keeps the value half first
    assert torch.equal(swiglu_ref(torch.cat((gate, up), dim=-1)), out[0])


def test_qk_norm_rope(run):
    (q, q_normed), (k, k_normed) = run["attn.norm_q"], run["attn.norm_k"]
    attn = run["block"].attn
    cos, sin = (t[:, :12].to(q.dtype) for t in run["rope"])
    out = qk_norm_rope_ref(q[0], k[0], attn.norm_q.weight, attn.norm_k.weight, cos, sin, EPS)
    assert torch.equal(out[0], oracle._apply_rotary_emb(q_normed, *run["rope"])[0])
    assert torch.equal(out[1], oracle._apply_rotary_emb(k_normed, *run["rope"])[0])
