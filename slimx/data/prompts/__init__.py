"""Prompts: their files, the mapping of rows, and their order in a run."""
