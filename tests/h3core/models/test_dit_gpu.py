"""What only a GPU shows of the transformer."""

import pytest
import torch

from comfyui_h3.h3core.checkpoint.official import Checkpoint
from comfyui_h3.h3core.request import resolve
from comfyui_h3.h3core.sampling.packing import pack
from comfyui_h3.h3core.types import Request

pytestmark = pytest.mark.gpu


@pytest.fixture
def forward(tiny_h3, device):
    """One bfloat16 forward of the tiny transformer."""
    checkpoint = Checkpoint.open(tiny_h3, "fl2va")
    dit = checkpoint.load_dit(device, torch.bfloat16)
    request, _ = resolve(Request(prompt="x", width=96, height=64, num_frames=22))
    sequence = pack(request, torch.ones(9, dtype=torch.int32))
    layout = sequence.layout
    timesteps, index = sequence.timestep_rows(*torch.tensor((0.2, 0.45)))
    modulation = checkpoint.read_modulation([timesteps], device, torch.bfloat16)
    generator = torch.Generator(device).manual_seed(0)
    text, audio, video = (
        torch.randn(rows, width, device=device, generator=generator)
        for rows, width in ((9, 128), (layout.num_audio, 32), (layout.num_video, 96))
    )
    prefix = dit.embed_text(text)
    cos, sin = dit.rope(sequence.position_ids.to(device), torch.bfloat16)
    index, modality = index.to(device), sequence.modality.to(device)
    return lambda: dit(prefix, audio, video, modulation, index, modality, cos, sin)


@torch.no_grad()
def test_a_forward_never_waits_for_the_device(forward):
    forward()  # kernels are compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@torch.no_grad()
def test_a_forward_gives_the_same_bits_again(forward):
    first, second = forward(), forward()
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
