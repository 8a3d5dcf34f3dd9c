"""The name of block scales, apart from `block_fp8` so that who needs only the name does not import torch."""

SCALE_SUFFIX = "_scale_inv"
"""What Hugging Face's block-fp8 checkpoints and SGLang append to a quantised tensor's name for its scales."""
