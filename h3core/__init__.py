"""The engine: it runs MiniMax H3 without a host."""
