"""The megatron-core trainer: parallel state, model, passes, optimizer, checkpoints, and its Ray worker."""
