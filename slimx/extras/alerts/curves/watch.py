"""All checks of a run's metrics, by policy and data set."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from slimx.config.sections.policies import policy_of
from slimx.extras.alerts.curves.checks import (
    Check,
    Drops,
    Entropy,
    Gap,
    HeldOutFell,
    RewardFell,
    Stale,
    Truncated,
)
from slimx.extras.alerts.curves.no_signal import NoSignal
from slimx.extras.alerts.finding import Finding

_HELD_OUT = re.compile(r"eval/(?:(.+)/)?accuracy")
BY_POLICY: tuple[type[Check], ...] = (Gap, RewardFell, Entropy, Stale, Truncated)
"""Checks that each policy has besides `NoSignal`, if its metrics are logged."""


class Curves:
    """Checks of a run's metrics. Their findings depend only on the metrics of all steps, in order."""

    def __init__(self, groups: int, off: Collection[str] = (), *, passing: float = 1.0) -> None:
        """Creates checks without a history. `groups`: `rollout.prompts_per_step`; `off`: names of alerts that are
        never opened; `passing`: `eval.passing`, the minimum reward of a correct answer."""
        self._off = off
        self._passing = passing
        self._drops = Drops("", groups)
        self._by_policy: dict[str, list[Check]] = {}
        self._held_out: dict[str, HeldOutFell] = {}

    def look(self, metrics: Mapping[str, float]) -> Iterator[tuple[bool, Finding]]:
        """Yields a pair (True if it opens, the finding) for each alert that the metrics of the next step open or
        close."""
        by_policy: dict[str, dict[str, float]] = {"": {}}
        for name, value in metrics.items():
            policy, rest = policy_of(name)
            by_policy.setdefault(policy, {})[rest] = value
            held_out = _HELD_OUT.fullmatch(name)
            if held_out is not None and name not in self._held_out:
                self._held_out[name] = HeldOutFell(held_out[1] or "", name)
        pairs: list[tuple[Check, Mapping[str, float]]] = [(self._drops, metrics)]
        for policy, of_policy in by_policy.items():
            if policy not in self._by_policy:
                about = policy and f"policy/{policy}"
                checks = [kind(about) for kind in BY_POLICY]
                self._by_policy[policy] = [NoSignal(about, self._passing), *checks]
            for check in self._by_policy[policy]:
                pairs.append((check, of_policy))
        for of_set in self._held_out.values():
            pairs.append((of_set, metrics))
        for check, values in pairs:
            finding = check.look(values)
            if finding is not None and finding.name not in self._off and check.gate.passes(finding):
                yield check.gate.is_open, finding
