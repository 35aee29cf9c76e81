"""Faster ways to the same numbers, and named approximations: what runs is chosen once, logged and reported."""
