"""Chunk sizes of linear attention and state-space layers, in tokens."""

CHUNK = 64
"""Chunk of a delta net, and of a Mamba-2 layer in plain torch."""
STATE_CHUNK = 128
"""Chunk of a Mamba-2 layer in mamba_ssm, as set by megatron-core's mixer."""
