"""Generalized advantage estimation as a loop over tokens."""

from __future__ import annotations


def naive(
    rewards: list[float], values: list[float], mask: list[bool], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """The double sum of the paper: A_i = sum_k (gamma lam)^k delta_{i+k} over the trained tokens only."""
    at = [t for t, trained in enumerate(mask) if trained]
    deltas = []
    for number, t in enumerate(at):
        following = values[at[number + 1]] if number + 1 < len(at) else 0.0
        deltas.append(rewards[t] + gamma * following - values[t])
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for number, t in enumerate(at):
        advantages[t] = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[number:]))
        returns[t] = advantages[t] + values[t]
    return advantages, returns
