"""Advantages from a reward for every token: PPO's with a critic's values, REINFORCE++'s without."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from slimx.algorithms.advantages.gae import explained_variance, gae, token_rewards, whiten
from slimx.algorithms.losses.kl import ESTIMATORS
from slimx.config.sections.algorithm import Algorithm
from slimx.data.batch import TrainingRow


def assign_advantages(
    algorithm: Algorithm,
    rows: Sequence[TrainingRow],
    scores: Sequence[float],
    values: Sequence[np.ndarray] | None = None,
    reference: Sequence[np.ndarray] | None = None,
) -> dict[str, float]:
    """Give every row of a step its `advantages`, with a critic its `values` and `returns` too; the metrics of the whole
    step.

    Per row: its trajectory's score, the critic's values [n] and, where rewards are penalised, the reference's log-probs
    [n]. The policy's log-probs are the engine's: the penalty belongs to the distribution that was sampled from. Without
    a critic an advantage is the discounted sum of the rewards from its token on (REINFORCE++, 2501.03262).
    Advantages are whitened here, over all updates of the step, and the metrics of them are from before."""
    mask = _padded([row.loss_weight > 0 for row in rows]).bool()
    kl = None
    if reference is not None:
        estimate = ESTIMATORS[algorithm.kl_reward_estimator]
        kl = estimate(_padded([row.rollout_logprobs for row in rows]), _padded(reference))
    rewards = token_rewards(torch.tensor(scores, dtype=torch.float64), mask, kl=kl, kl_coef=algorithm.kl_reward_coef)
    value = torch.zeros(mask.shape, dtype=torch.float64) if values is None else _padded(values)
    lam = 1.0 if values is None else algorithm.gae_lambda
    advantages, returns = gae(rewards, value, mask, gamma=algorithm.gamma, lam=lam)
    metrics = {
        "return/mean": returns[mask].mean().item(),
        "advantage/mean": advantages[mask].mean().item(),
        "advantage/std": advantages[mask].std(correction=0).item(),
    }
    if kl is not None:
        metrics["kl/reward"] = kl[mask].mean().item()
    if values is not None:
        metrics["value/explained_variance"] = explained_variance(value, returns, mask)
        for row, v, r in zip(rows, values, returns, strict=True):
            row.values = np.asarray(v, np.float32)
            row.returns = r[: len(row)].numpy().astype(np.float32)
    if algorithm.whiten:
        advantages = whiten(advantages, mask)
    for row, a in zip(rows, advantages, strict=True):
        row.advantages = a[: len(row)].numpy().astype(np.float32)
    return metrics


def _padded(rows: Sequence[np.ndarray]) -> torch.Tensor:
    """float64 [B, L]: rows of different lengths side by side, zeros behind them."""
    out = np.zeros((len(rows), max(map(len, rows))))
    for target, row in zip(out, rows, strict=True):
        target[: len(row)] = row
    return torch.from_numpy(out)
