"""Advantages of a group's rollouts, from one reward each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def mean(values: Sequence[float]) -> float:
    """The mean, which of equal values is their value to the last bit."""
    return values[0] + sum(value - values[0] for value in values) / len(values)


def _above_first(rewards: Sequence[float]) -> np.ndarray:
    """Rewards minus the first of them, float64 [n]: of equal rewards the mean is then 0 to the last bit, and their
    advantages with it, which a mean of eight times 0.1 would round to 1e-17."""
    values = np.asarray(rewards, dtype=np.float64)
    return values - values[:1]


def grpo(rewards: Sequence[float], *, normalize_std: bool = True, eps: float = 1e-6) -> np.ndarray:
    """Group-relative advantages, float32 [n]: (r - mean) / (std + eps) (DeepSeekMath, 2402.03300).

    The standard deviation is the unbiased one (n - 1). A group of one rollout has no baseline: its advantage is 0.
    Without `normalize_std` the division is left out (Dr. GRPO, 2503.20783).
    """
    values = _above_first(rewards)
    centred = values - values.mean()
    if normalize_std and len(values) > 1:
        centred = centred / (values.std(ddof=1) + eps)
    return centred.astype(np.float32)


def rloo(rewards: Sequence[float]) -> np.ndarray:
    """Reward minus the mean of the group's other rollouts, float32 [n] (RLOO, 2402.14740); 0 where there is none."""
    values = _above_first(rewards)
    others = max(len(values) - 1, 1)
    return (len(values) / others * (values - values.mean())).astype(np.float32)


def opo(rewards: Sequence[float], lengths: Sequence[float]) -> np.ndarray:
    """Reward minus the mean weighted by length, float32 [n]: the baseline of least variance where a rollout's squared
    gradient grows with its `lengths` tokens (OPO, 2505.23585). Without any token the plain mean."""
    values, weights = _above_first(rewards), np.asarray(lengths, dtype=np.float64)
    baseline = np.average(values, weights=weights if weights.sum() else None)
    return (values - baseline).astype(np.float32)


def gradient_share(groups: Sequence[Sequence[float]]) -> float:
    """The share of rollouts in groups whose rewards are not all equal, which alone have a gradient; 1 if no group has.

    GPG (2504.02546) divides by it, so that a batch of many groups without a gradient makes no smaller step."""
    with_gradient = sum(len(rewards) for rewards in groups if len(set(rewards)) > 1)
    return with_gradient / sum(map(len, groups)) if with_gradient else 1.0


def remax(rewards: Sequence[float], baseline: float) -> np.ndarray:
    """Reward minus that of a greedy answer to the same prompt, float32 [n] (ReMax, 2310.10505)."""
    return (np.asarray(rewards, dtype=np.float64) - baseline).astype(np.float32)


def gdpo(parts: Mapping[str, Sequence[float]], weights: Mapping[str, float], *, eps: float = 1e-6) -> np.ndarray:
    """Each reward part normalised in the group on its own, then summed with its weight (1 where `weights` has none),
    float32 [n] (GDPO, 2601.05242). A part that hardly varies then counts as much as one that varies a lot, which a sum
    of rewards would hide. Normalising over the batch is the caller's."""
    total = sum(weights.get(name, 1.0) * grpo(values, eps=eps).astype(np.float64) for name, values in parts.items())
    return np.asarray(total, np.float32)


def standardise(values: np.ndarray, *, eps: float = 1e-8) -> np.ndarray:
    """Mean 0 and standard deviation 1 over all of them (GDPO's last step; here n in the denominator)."""
    centred = values.astype(np.float64) - values.mean(dtype=np.float64)
    return (centred / np.sqrt(np.square(centred).mean() + eps)).astype(np.float32)
