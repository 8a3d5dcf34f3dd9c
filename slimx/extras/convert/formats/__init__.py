"""Formats of checkpoints: for each, which tensors its files contain, and how the bytes are written and read."""
