"""Fused operations of MiniMax H3: one file per operation, each with its torch reference."""
