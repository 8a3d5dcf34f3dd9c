"""The Megatron-core trainer: parallel state, model, forward and backward, optimizer, checkpoint, and its Ray worker."""
