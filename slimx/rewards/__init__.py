"""Parts that reward hooks share: requirements of a hook, and several hooks as one.

In: reward hooks by name, and the data sets of the prompts.
Out: one reward hook that calls the right one for each prompt.
Read first: `mixture.py`.
"""
