"""Environments of multi-turn rollouts: their interface, and processes for environments that compute for long.

In: a turn of the model.
Out: an observation, a reward, and whether the episode has ended.
Read first: `base.py`.
"""
