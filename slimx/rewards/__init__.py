"""Parts that reward hooks share: what a hook needs of its process, and several hooks as one.

In: reward hooks by name, and the prompts' data sets.
Out: one reward hook that asks the right one for each prompt.
Read first: `mixture.py`.
"""
