"""Reads and writes checkpoint files: Hugging Face directories, and the metadata of Megatron-LM's torch_dist
checkpoints."""
