"""Pixels, samples and files."""
