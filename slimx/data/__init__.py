"""Records of the loop, prompts, and batches of the trainers.

In: files of prompts, and trajectories that rollouts have made.
Out: prompts in a repeatable order, rows aligned with predicted tokens, micro-batches of equal cost.
Read first: `records.py`, then `batch.py` and `packing.py`.
"""
