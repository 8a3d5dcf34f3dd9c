"""Prompts: their files, what a row becomes, and the order in which a run takes them."""
