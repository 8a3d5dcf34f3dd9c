"""Steps of which a policy learned nothing: all rollouts of each group earned the same, or the gradient was 0."""

from __future__ import annotations

from collections.abc import Mapping

AFTER = 5
"""Steps in a row without a signal after which a run says so."""
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


def without_signal(metrics: Mapping[str, float]) -> dict[str, str]:
    """Sentences about the policies whose steps have been without a signal for `AFTER` steps or more, by the prefix of
    their metrics, from the metrics of the last step."""
    out = {}
    for key, steps in metrics.items():
        if not key.endswith(STEPS) or (steps or 0) < AFTER:
            continue
        prefix = key.removesuffix(STEPS)
        same = metrics.get(prefix + GROUPS) == 1
        why = "all rollouts of each group earn the same" if same else "the gradient is 0"
        reward = metrics.get(prefix + "reward/mean")
        shown = "" if reward is None else f", {prefix}reward/mean {reward:.4g}"
        out[prefix] = (
            f"no signal for {steps:.0f} steps, {why}{shown}; "
            "docs/guides/when-it-goes-wrong.md says under Groups without a signal what helps"
        )
    return out


def said_again(steps: float) -> bool:
    """Returns True after `AFTER` steps, and again whenever they have doubled."""
    times, rest = divmod(int(steps), AFTER)
    return times > 0 and rest == 0 and times & (times - 1) == 0
