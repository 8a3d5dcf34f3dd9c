"""Advantages of a group's rollouts, from one reward each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from slimx.data.records import Trajectory


def reward_of(trajectory: Trajectory) -> float:
    """Returns the reward of a scored trajectory."""
    assert trajectory.reward is not None
    return trajectory.reward


def mean(values: Sequence[float]) -> float:
    """Computes the mean; for equal values it is their value, bit for bit."""
    return values[0] + sum(value - values[0] for value in values) / len(values)


def _above_first(rewards: Sequence[float]) -> np.ndarray:
    """Returns rewards minus the first of them, float64 [n]: for equal rewards mean and advantages are then 0, bit for
    bit, whereas e.g. the mean of eight times 0.1 is off by 1e-17."""
    values = np.asarray(rewards, dtype=np.float64)
    return values - values[:1]


def grpo(rewards: Sequence[float], *, normalize_std: bool = True, eps: float = 1e-6) -> np.ndarray:
    """Computes group-relative advantages, float32 [n]: (r - mean) / (std + eps) (DeepSeekMath, 2402.03300).

    The standard deviation is the unbiased one (n - 1). A group of one rollout has no baseline: its advantage is 0.
    Without `normalize_std` there is no division (Dr. GRPO, 2503.20783).
    """
    values = _above_first(rewards)
    centred = values - values.mean()
    if normalize_std and len(values) > 1:
        centred = centred / (values.std(ddof=1) + eps)
    return centred.astype(np.float32)


def rloo(rewards: Sequence[float]) -> np.ndarray:
    """Subtracts the mean of the group's other rollouts, float32 [n] (RLOO, 2402.14740); 0 without other rollouts."""
    values = _above_first(rewards)
    others = max(len(values) - 1, 1)
    return (len(values) / others * (values - values.mean())).astype(np.float32)


def opo(rewards: Sequence[float], lengths: Sequence[float]) -> np.ndarray:
    """Subtracts the mean weighted by length, float32 [n]: the baseline of least variance if a rollout's squared
    gradient grows with its `lengths` tokens (OPO, 2505.23585). Without any token it is the plain mean."""
    values = _above_first(rewards)
    weights = np.asarray(lengths, dtype=np.float64)
    baseline = np.average(values, weights=weights if weights.sum() else None)
    return (values - baseline).astype(np.float32)


def gradient_share(groups: Sequence[Sequence[float]]) -> float:
    """Returns the fraction of rollouts with a gradient, i.e. in groups whose rewards differ; 1 if there are none.

    GPG (2504.02546) divides by it, so a batch with many groups without a gradient does not make a smaller step."""
    total = 0
    with_gradient = 0
    for rewards in groups:
        total += len(rewards)
        if len(set(rewards)) > 1:
            with_gradient += len(rewards)
    return with_gradient / total if with_gradient else 1.0


def remax(rewards: Sequence[float], baseline: float) -> np.ndarray:
    """Subtracts the reward of a greedy response to the same prompt, float32 [n] (ReMax, 2310.10505)."""
    return (np.asarray(rewards, dtype=np.float64) - baseline).astype(np.float32)


def gdpo(parts: Mapping[str, Sequence[float]], weights: Mapping[str, float], *, eps: float = 1e-6) -> np.ndarray:
    """Normalizes each reward part separately in the group, then sums them with their weights (1 if missing in
    `weights`), float32 [n] (GDPO, 2601.05242). A part with little variance then counts as much as one with a lot, which
    a sum of rewards would hide. The caller normalizes over the batch."""
    total: np.ndarray | float = 0.0
    for name, values in parts.items():
        total = total + weights.get(name, 1.0) * grpo(values, eps=eps).astype(np.float64)
    return np.asarray(total, np.float32)


def standardize(values: np.ndarray, *, eps: float = 1e-8) -> np.ndarray:
    """Scales to mean 0 and standard deviation 1 over all values (GDPO's last step; here with n in the denominator)."""
    centred = values.astype(np.float64) - values.mean(dtype=np.float64)
    return (centred / np.sqrt(np.square(centred).mean() + eps)).astype(np.float32)
