"""Prompts: reading of files, mapping of rows, and the order of prompts in a run."""
