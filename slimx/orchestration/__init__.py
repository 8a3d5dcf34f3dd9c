"""A run: its assembly, the training loop, checkpoints, beginning and end."""
