"""The megatron-core trainer: one process for each rank.

In: a configuration, initial weights, and this rank's micro-batches.
Out: step metrics, checkpoints, and buckets of weights for the engines.
Read first: `worker.py` and `rank.py`, then `trainer.py` and `step/forward_backward.py`.
"""
