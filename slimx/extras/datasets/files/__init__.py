"""Prompt files in other formats than JSON Lines."""
