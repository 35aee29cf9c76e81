"""The audio VAE: DAC encoder, BigVGAN decoder."""
