"""The trainer, built on megatron-core: the code of one trainer rank, which is one process.

In: a configuration, initial weights, and in every step this rank's micro-batches.
Out: step metrics, checkpoints, and buckets of weights for the engines.
Read first: `worker.py` and `rank.py`, then `trainer.py` and `step/forward_backward.py`.
"""
