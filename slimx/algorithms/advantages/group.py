"""Formulas for the advantages of a group's rollouts, given one reward per rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from slimx.data.records import Trajectory


def reward_of(trajectory: Trajectory) -> float:
    """Returns the reward of a trajectory, which must have been scored."""
    assert trajectory.reward is not None
    return trajectory.reward


def mean(values: Sequence[float]) -> float:
    """Computes the mean of `values`. If all values are equal, the result is that value, bit for bit."""
    return values[0] + sum(value - values[0] for value in values) / len(values)


def _above_first(rewards: Sequence[float]) -> np.ndarray:
    """Returns the rewards minus the first reward, float64 [n]. If all rewards are equal, the mean of these differences
    and the advantages are exactly 0, whereas the mean of, for example, eight rewards of 0.1 has a rounding error of
    1e-17."""
    values = np.asarray(rewards, dtype=np.float64)
    return values - values[:1]


def grpo(rewards: Sequence[float], *, normalize_std: bool = True, eps: float = 1e-6) -> np.ndarray:
    """Computes group-relative advantages, float32 [n]: (reward - mean) / (std + eps) (GRPO; DeepSeekMath, 2402.03300).

    The standard deviation is the sample standard deviation (n - 1 in the denominator). A group of one rollout has no
    baseline, so its advantage is 0. Without `normalize_std` the difference is not divided (Dr. GRPO, 2503.20783).
    """
    values = _above_first(rewards)
    centered = values - values.mean()
    if normalize_std and len(values) > 1:
        centered = centered / (values.std(ddof=1) + eps)
    return centered.astype(np.float32)


def rloo(rewards: Sequence[float]) -> np.ndarray:
    """Computes leave-one-out advantages, float32 [n]: each reward minus the mean reward of the group's other rollouts
    (RLOO, 2402.14740); 0 if there are no other rollouts."""
    values = _above_first(rewards)
    others = max(len(values) - 1, 1)
    return (len(values) / others * (values - values.mean())).astype(np.float32)


def opo(rewards: Sequence[float], lengths: Sequence[float]) -> np.ndarray:
    """Computes each reward minus the mean reward weighted by length, float32 [n] (OPO, 2505.23585).

    `lengths`: number of trained tokens of each rollout. This baseline has the least variance if the squared norm of a
    rollout's gradient grows with its length. If all lengths are 0, the baseline is the plain mean."""
    values = _above_first(rewards)
    weights = np.asarray(lengths, dtype=np.float64)
    baseline = np.average(values, weights=weights if weights.sum() else None)
    return (values - baseline).astype(np.float32)


def gradient_share(groups: Sequence[Sequence[float]]) -> float:
    """Returns the fraction of rollouts that contribute a gradient, namely those in groups whose rewards differ; 1 if no
    rollout contributes one. `groups`: rewards of each group's rollouts.

    GPG (2504.02546) divides advantages by this fraction, so that a batch with many groups without a gradient does not
    make a smaller step."""
    total = 0
    with_gradient = 0
    for rewards in groups:
        total += len(rewards)
        if len(set(rewards)) > 1:
            with_gradient += len(rewards)
    return with_gradient / total if with_gradient else 1.0


def remax(rewards: Sequence[float], baseline: float) -> np.ndarray:
    """Computes each reward minus `baseline`, the reward of a greedy response to the same prompt, float32 [n] (ReMax,
    2310.10505)."""
    return (np.asarray(rewards, dtype=np.float64) - baseline).astype(np.float32)


def gdpo(parts: Mapping[str, Sequence[float]], weights: Mapping[str, float], *, eps: float = 1e-6) -> np.ndarray:
    """Computes advantages from several rewards, float32 [n]: each reward part is normalized separately in the group,
    then the parts are summed with their weights (GDPO, arXiv:2601.05242).

    A part with little variance thus counts as much as one with a lot, which would not be so if the sum were normalized.
    `parts`: one value per rollout for each part; `weights`: weight by part, 1 for missing ones. The caller normalizes
    the result over the batch."""
    total: np.ndarray | float = 0.0
    for name, values in parts.items():
        total = total + weights.get(name, 1.0) * grpo(values, eps=eps).astype(np.float64)
    return np.asarray(total, np.float32)


def standardize(values: np.ndarray, *, eps: float = 1e-8) -> np.ndarray:
    """Scales `values` to mean 0 and standard deviation 1 over all values. This is GDPO's last step; here the variance
    has n in the denominator."""
    centered = values.astype(np.float64) - values.mean(dtype=np.float64)
    return (centered / np.sqrt(np.square(centered).mean() + eps)).astype(np.float32)
