"""Ray placement, the training loop, saving and recovery."""
