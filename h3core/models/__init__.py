"""Architectures only: they know neither checkpoints, ranks, caches nor devices."""
