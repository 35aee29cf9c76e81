"""The denoising loop: sigmas, noise, packed rows, solver."""
