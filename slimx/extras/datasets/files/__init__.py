"""Prompt files in formats other than JSON Lines."""
