"""The text encoder: a truncated Qwen3-VL."""
