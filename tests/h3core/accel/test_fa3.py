"""FlashAttention 3 computes what PyTorch's own attention does."""

import pytest
import torch

from comfyui_h3.h3core.accel.attention import choose_attention
from comfyui_h3.h3core.models.dit.attention import sdpa
from comfyui_h3.tests.tolerances import BF16_ATTENTION, relative_error

pytestmark = pytest.mark.gpu


@pytest.fixture
def fa3(device):
    """The attention that is chosen for the released model."""
    pytest.importorskip("fa3_fwd_interface", reason="the package fa3-fwd is not installed")
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("FlashAttention 3 needs a Hopper GPU")
    chosen = choose_attention("auto", device, torch.bfloat16, 128)
    assert chosen.name == "fa3"
    return chosen.attend


@pytest.mark.parametrize("num_rows", [1, 63, 1024, 4722])
def test_equals_a_float32_computation(num_rows, fa3, device):
    g = torch.Generator(device).manual_seed(0)
    qkv = torch.randn(num_rows, 3, 8, 128, device=device, generator=g).bfloat16()
    q, k, v = qkv.unbind(1)  # rows strided, as those of the projection are
    wanted = sdpa(q.float(), k.float(), v.float())
    ours, theirs = fa3(q, k, v).float(), sdpa(q, k, v).float()
    assert relative_error(ours, wanted) <= BF16_ATTENTION
    assert (ours - wanted).norm() <= 1.1 * (theirs - wanted).norm()  # no worse than PyTorch's own
    assert torch.equal(fa3(q, k, v), fa3(q, k, v))


def test_every_row_of_a_long_sequence_is_attended_to(fa3, device):
    """With equal keys the mean over the values of all rows comes out."""
    num_rows = 109_599  # of a 15 s clip at 1344x768
    zeros = torch.zeros(num_rows, 1, 128, device=device, dtype=torch.bfloat16)
    values = (torch.arange(num_rows, device=device) % 257).bfloat16()[:, None, None].expand(-1, 1, 128).contiguous()
    out = fa3(zeros, zeros, values)
    torch.testing.assert_close(out.float(), values.float().mean().expand_as(out), rtol=1e-2, atol=0)
