"""Advantages and losses: pure functions of arrays and tensors, without processes and without a model.

In: groups of trajectories with rewards, and per-token log-probs of a micro-batch.
Out: per-token advantages, and the loss of a micro-batch with its metrics.
Read first: `losses/surrogates.py` for objectives, `advantages/estimate.py` for estimators.
"""
