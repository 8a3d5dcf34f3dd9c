"""Records of the training loop, prompts, and batches for the trainers.

In: prompt files, and trajectories of rollouts.
Out: prompts in a reproducible order, rows aligned with predicted tokens, micro-batches of equal cost.
Read first: `records.py`, then `batch.py` and `packing.py`.
"""
