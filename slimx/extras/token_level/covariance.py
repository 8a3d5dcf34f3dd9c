"""Selection of the tokens that Clip-Cov and KL-Cov (arXiv:2505.22617) restrain: those whose log-prob and advantage have
the highest covariance, because these tokens make a policy's entropy collapse."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slimx.algorithms.advantages.estimate import Estimator, StepData
from slimx.config.sections.objectives import ClipCov, KlCov
from slimx.data.batch import TrainingRow


class Selection(Estimator):
    """Estimator that selects tokens by the covariance of log-prob and advantage; the loss clip_cov excludes the
    selected tokens, and kl_cov penalizes them."""

    def finish(self, step: StepData) -> dict[str, float]:
        loss = self.algorithm.loss
        if not isinstance(loss, ClipCov | KlCov):
            raise TypeError(f"loss {loss.kind} does not select tokens")
        metrics: dict[str, list[float]] = {}
        for index, update in enumerate(step.updates):
            for name, value in select_tokens(loss, update, (*step.seed, index)).items():
                metrics.setdefault(name, []).append(value)
        return {name: float(np.mean(values)) for name, values in metrics.items()}


def select_tokens(loss: ClipCov | KlCov, rows: Sequence[TrainingRow], seed: Sequence[int]) -> dict[str, float]:
    """Sets the column `selected` of the rows of one update, and returns metrics.

    A trained token's covariance is (log p - mean log p)(A - mean A). The means are over all trained tokens of the
    update, and log p is the log-prob from the engine that sampled the token. These log-probs are known before packing,
    so the selection does not depend on packing or layout (the paper's code uses the current policy's log-probs,
    micro-batch by micro-batch).

    With n trained tokens, max(1, `share` x n) are selected: those with the highest covariance (kl_cov), or random ones
    with a covariance between `covariance_low` and `covariance_high` (clip_cov), of which there may be fewer. `seed`:
    seed for the random selection."""
    masks = [row.weight > 0 for row in rows]
    logprobs = _joined([row.rollout_logprobs for row in rows], masks)
    advantages = _joined([row.advantages for row in rows], masks)
    covariance = (logprobs - logprobs.mean()) * (advantages - advantages.mean())
    count = max(1, int(loss.share * len(covariance)))
    if isinstance(loss, KlCov):
        indices = np.argsort(-covariance, kind="stable")[:count]
    else:
        within = np.flatnonzero((covariance > loss.covariance_low) & (covariance < loss.covariance_high))
        # Raw output of PCG64, which is the same in every release of NumPy.
        keys = np.random.PCG64(list(seed)).random_raw(len(within))
        indices = within[np.argsort(keys, kind="stable")[:count]]
    selected = np.zeros(len(covariance), np.float32)
    selected[indices] = 1
    ends = np.cumsum([mask.sum() for mask in masks])
    for row, mask, part in zip(rows, masks, np.split(selected, ends[:-1]), strict=True):
        row.selected = np.zeros(len(row), np.float32)
        row.selected[mask] = part
    return {
        "covariance/selected": len(indices) / len(covariance),
        "covariance/mean": float(covariance.mean()),
        "covariance/max": float(covariance.max()),
    }


def _joined(columns: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenates the entries of `columns` at which the corresponding masks are True, as float64."""
    return np.concatenate([column[mask] for column, mask in zip(columns, masks, strict=True)]).astype(np.float64)
