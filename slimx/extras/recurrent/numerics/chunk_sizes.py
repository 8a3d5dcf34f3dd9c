"""Tokens of the chunks into which kernels of linear attention and state-space layers cut sequences."""

CHUNK = 64
"""Tokens of a delta net's chunk, and with plain torch of a Mamba-2 layer's."""
STATE_CHUNK = 128
"""Tokens of a Mamba-2 layer's chunk, as megatron-core's mixer asks mamba_ssm for them."""
