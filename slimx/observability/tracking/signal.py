"""Steps of which a policy learned nothing: all rollouts of each group earned the same, or the gradient was 0."""

from __future__ import annotations

from collections.abc import Mapping

STEPS = "optim/steps_without_signal"
"""Metric that counts them."""
GROUPS, NORM = "reward/groups_without_signal", "optim/grad_norm"


class Signal:
    """Counts the steps in a row without a signal, for each trained policy. A process counts from 0."""

    def __init__(self, compared: Mapping[str, bool]):
        """`compared`: by the prefix of each policy's metrics, whether its advantages compare rollouts of a group and
        nothing else gives them."""
        self._compared, self._steps = compared, dict.fromkeys(compared, 0)

    def counted(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Counts a step by its metrics; returns the counts of all policies as metrics."""
        for prefix, compared in self._compared.items():
            silent = metrics.get(prefix + NORM) == 0 or (compared and metrics.get(prefix + GROUPS) == 1)
            self._steps[prefix] = self._steps[prefix] + 1 if silent else 0
        return {prefix + STEPS: float(steps) for prefix, steps in self._steps.items()}
