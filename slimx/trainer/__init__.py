"""The megatron-core trainer: one process for each rank.

In: a configuration, initial weights, and micro-batches of this rank.
Out: metrics of steps, checkpoints, and buckets of weights for engines.
Read first: `worker.py` and `rank.py`, then `trainer.py` and `step/forward_backward.py`.
"""
