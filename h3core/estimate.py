"""What a request costs on the released model, before anything is loaded: rows, arithmetic, memory."""

from __future__ import annotations

from dataclasses import dataclass

from comfyui_h3.h3core.models.dit.config import DiTConfig
from comfyui_h3.h3core.request import resolve_size
from comfyui_h3.h3core.sampling.packing import layout_of

RELEASE = DiTConfig()
BF16_BYTES = 2
RELEASE_FORWARDS = 49

# Of the released model as a GPU holds it in bf16. The modulator is read for its tables, a layer at a time, and is not
# kept. Transformer and text encoder follow each other, so that they need not be on a device together.
DIT_BYTES = 40_138_350_656
MODULATOR_BYTES = 26_142_079_488
TEXT_ENCODER_BYTES = 51_506_191_840  # its 50 layers, embeddings and vision tower
VAE_BYTES = 6_173_724_180  # both halves of both; the decoder of the video in float16
TABLES_BYTES = 969_830_400  # of 100 timesteps: two in each of 49 forwards, and those of conditions


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Rows of picture and sound, without those of the prompt and its media, and what they cost in one forward."""

    num_video_rows: int
    num_audio_rows: int

    @property
    def num_rows(self) -> int:
        return self.num_video_rows + self.num_audio_rows

    @property
    def forward_flops(self) -> float:
        return forward_flops(self.num_rows)

    @property
    def activation_bytes(self) -> int:
        """Most memory that a forward in bf16 takes on one device, weights aside."""
        return self.num_rows * RELEASE.bytes_per_row(BF16_BYTES)

    @property
    def resident_bytes(self) -> int:
        """Most memory that a job takes whose weights all stay on the device."""
        return DIT_BYTES + TEXT_ENCODER_BYTES + VAE_BYTES + TABLES_BYTES + self.activation_bytes


def estimate(width: int, height: int, num_frames: int) -> Estimate:
    """Cost of a video of this size. Raises RequestError for one that is not possible."""
    resolved, _ = resolve_size(width, height, num_frames, None, "t2va")
    layout = layout_of(resolved, num_text=0)
    return Estimate(num_video_rows=layout.num_video, num_audio_rows=layout.num_audio)


def forward_flops(num_rows: int, config: DiTConfig = RELEASE) -> float:
    """Floating point operations of one forward over ``num_rows`` rows: matrix products and attention of the blocks.

    Modulation, heads and refiner are under one percent.
    """
    hidden, inner, ffn = config.hidden_size, config.inner_size, config.ffn_hidden_size
    weights = hidden * (3 * inner + inner + 2 * ffn + ffn)  # qkv, out, fc1, fc2
    return config.num_layers * (2.0 * weights * num_rows + 4.0 * inner * num_rows**2)
