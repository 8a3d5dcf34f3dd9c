"""Chunk sizes of gated delta nets and Mamba-2 layers, in tokens."""

CHUNK = 64
"""Chunk size of a delta net, and of a Mamba-2 layer in plain torch."""
STATE_CHUNK = 128
"""Chunk size of a Mamba-2 layer in mamba_ssm, as megatron-core's mixer sets it."""
