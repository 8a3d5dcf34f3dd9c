"""Families of models beyond Qwen3: how trainer, checkpoints and engines hold each tensor."""
