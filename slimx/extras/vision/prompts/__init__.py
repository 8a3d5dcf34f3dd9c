"""Prompts with images: rows of data sets as prompts, checks before a run starts, and token ids."""
