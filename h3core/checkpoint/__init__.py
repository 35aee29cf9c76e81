"""Reading checkpoints: shard headers, key tables, streaming load."""
