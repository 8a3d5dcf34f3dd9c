"""Prompts with images: rows of data sets as prompts, and checks before a run starts."""
