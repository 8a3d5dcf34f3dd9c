"""Chunk sizes of gated delta nets and Mamba-2 layers, in tokens."""

CHUNK = 64
"""Number of tokens per chunk in a delta net, and in a Mamba-2 layer computed in plain torch."""
STATE_CHUNK = 128
"""Number of tokens per chunk in mamba_ssm's kernels for a Mamba-2 layer, as set by megatron-core's mixer."""
