"""Facts about the encoder's tokens that a prompt is judged by, without a tokenizer at hand."""

MAX_TOKENS = 262_144  # positions of the encoder

CONTROL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Typed by a user these would become pad rows without pixels, or end a segment early: refused."""
