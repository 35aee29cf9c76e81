"""LoRA files: read, mapped to parameters of the transformer, and merged into its weights while these are read."""
