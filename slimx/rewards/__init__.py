"""Parts that reward hooks share: their declared requirements, and the combination of several hooks into one.

In: reward hooks, and the metadata of the prompts that select them.
Out: one reward hook that calls the right hooks for each prompt.
Read first: `mixture.py`.
"""
