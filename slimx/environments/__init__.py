"""Environments and tools of rollouts: their interfaces, and processes for those that compute.

In: an action of a rollout, such as the arguments of a tool call.
Out: an observation, a reward and whether the episode has ended.
Read first: `base.py`.
"""
