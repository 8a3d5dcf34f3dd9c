"""Checkpoint files of models, Hugging Face and Megatron."""
