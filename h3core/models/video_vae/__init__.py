"""The video VAE: causal convolution encoder, ViT decoder."""
