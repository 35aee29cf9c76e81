"""A tiny H3: a complete checkpoint of a few megabytes, with random weights, in the official directory layout.

Every code path of the real model runs on it, so it is what tests and the first demo use. Its pictures are noise.
"""
