"""Checkpoints of Megatron-LM as the start of a run."""
