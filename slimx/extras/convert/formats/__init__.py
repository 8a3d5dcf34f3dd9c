"""Files of each format of checkpoints: which tensors they hold, and how their bytes are written and read."""
