"""Checkpoints of Megatron-LM as initial weights of a run."""
