"""Checks of single metrics. Each check gets the metrics of every step and returns a finding, or None if the metric is
absent or its history is too short."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping
from statistics import median

from slimx.extras.alerts.curves.history import START, USUAL, History, noise
from slimx.extras.alerts.finding import Finding, Gate
from slimx.observability.tracking.metrics import GROUPS_WITHOUT_SIGNAL
from slimx.rollout.flow.rollouts import is_failure

Metrics = Mapping[str, float]

GAP_FACTOR = 4.0
"""Multiple of the usual gap, and of the gap at the start, above which a gap is bad."""
GAP_FLOOR = 1e-5
"""Gap below which no gap is bad, because float32 rounds."""
FALL_NOISE = 5.0
"""A fall of a reward is bad if it exceeds this multiple of the noise and the two shares below."""
FALL_RANGE = 0.3
"""Share of the distance between the lowest and the best level."""
FALL_BEST = 0.1
"""Share of the best level's magnitude."""
ENTROPY_SHARE = 0.1
"""Share of the entropy at the start below which the entropy is bad, if rollouts of a group have become equal."""
ENTROPY_SILENT = 0.8
"""Fraction of groups whose rollouts all have the same reward from which on they count as equal."""
EVALUATIONS = 5
"""Number of evaluations after which held-out rewards are judged."""
STALE_FACTOR = 2.0
"""Multiple of the usual staleness (at least the usual staleness plus 1) above which staleness is bad."""
DROPS_MORE = 0.1
"""Increase of the number of dropped groups, relative to the trained ones, that is bad."""
CUT_MORE = 0.2
"""Increase of the share of truncated trajectories that is bad."""
CUT_SHARE = 0.5
"""Share of truncated trajectories that is bad even if it is usual, except in the first steps."""


class Check:
    """Check of one metric of one policy. `name` is the alert's name; the alert opens after `opens` consecutive bad
    findings and closes after `closes` good ones."""

    name: str
    opens: int
    closes: int

    def __init__(self, about: str) -> None:
        """Stores the policy or data set that the check concerns; "" for the policy `actor`."""
        self.about = about
        self.gate = Gate(self.opens, self.closes)
        self.bad = False

    @abstractmethod
    def look(self, metrics: Metrics) -> Finding | None:
        """Returns the finding about a step. `metrics`: metrics of the policy, without its prefix."""

    @property
    def unusual(self) -> bool:
        return self.bad or self.gate.is_open

    def found(self, *, bad: bool, good: bool, value: float, text: str, usual: str = "") -> Finding:
        self.bad = bad
        if usual:
            text = f"{text}, usually {usual}"
        return Finding(name=self.name, about=self.about, bad=bad, good=good, text=text, value=value, usual=usual)


class Gap(Check):
    """The log-probs of trainer and engine differ more than before."""

    name = "gap"
    opens = 5
    closes = 5

    def __init__(self, about: str) -> None:
        super().__init__(about)
        self._gaps = History(recent=5)

    def look(self, metrics: Metrics) -> Finding | None:
        gap = number(metrics, "gap/mean")
        if gap is None:
            return None
        self._gaps.add(gap, unusual=self.unusual)
        if not self._gaps.ready:
            return None
        level = self._gaps.level
        usual = min(self._gaps.usual, self._gaps.start)
        return self.found(
            bad=level > max(GAP_FACTOR * usual, GAP_FLOOR),
            good=level < max(GAP_FACTOR / 2 * usual, GAP_FLOOR),
            value=level,
            text=f"gap/mean {level:.3g}",
            usual=self._gaps.usual_range(),
        )


class RewardFell(Check):
    """The reward fell from its best level and stays low."""

    name = "reward_fell"
    opens = 10
    closes = 5
    metric = "reward/mean"

    def __init__(self, about: str) -> None:
        super().__init__(about)
        self._values: deque[float] = deque(maxlen=100)
        self._levels: deque[float] = deque(maxlen=10)
        self._best = -math.inf
        self._lowest = math.inf

    def look(self, metrics: Metrics) -> Finding | None:
        reward = number(metrics, self.metric)
        if reward is None:
            return None
        self._values.append(reward)
        self._levels.append(reward)
        if len(self._levels) < 10:
            return None
        level = median(self._levels)
        self._best = max(self._best, level)
        self._lowest = min(self._lowest, level)
        if len(self._values) < START:
            return None
        fall = self._best - level
        allowed = allowed_fall(self._best, self._lowest, noise(list(self._values)))
        return self.found(
            bad=fall > allowed,
            good=fall < allowed / 2,
            value=level,
            text=f"{self.metric} {level:.3g}, its best was {self._best:.3g}",
            usual=f"{self._best - allowed:.3g} to {self._best:.3g}",
        )


class HeldOutFell(Check):
    """Two evaluations in a row are far below the best one."""

    name = "heldout_fell"
    opens = 1
    closes = 1

    def __init__(self, about: str, metric: str) -> None:
        super().__init__(about)
        self.metric = metric
        self._values: deque[float] = deque(maxlen=USUAL)
        self._best = -math.inf
        self._lowest = math.inf

    def look(self, metrics: Metrics) -> Finding | None:
        reward = number(metrics, self.metric)
        if reward is None:
            return None
        self._values.append(reward)
        self._lowest = min(self._lowest, reward)
        values = list(self._values)
        earlier = values[:-2]
        if len(earlier) >= 3:  # a median, so that one lucky evaluation is not the best level
            self._best = max(self._best, median(earlier[-3:]))
        if len(earlier) < EVALUATIONS:
            return None
        allowed = allowed_fall(self._best, self._lowest, max(noise(earlier), noise(values)))
        return self.found(
            bad=self._best - max(values[-2:]) > allowed,
            good=self._best - reward < allowed / 2,
            value=reward,
            text=f"{self.metric} {reward:.3g}, its best was {self._best:.3g}",
            usual=f"{self._best - allowed:.3g} to {self._best:.3g}",
        )


class Entropy(Check):
    """The entropy fell to a fraction of that at the start, and rollouts of a group have become equal, although rewards
    of different prompts still differ. A model that has learned all prompts is no collapse."""

    name = "entropy"
    opens = 5
    closes = 5

    def __init__(self, about: str) -> None:
        super().__init__(about)
        self._entropy = History(recent=5)
        self._spread = History(recent=5)
        self._silent: deque[float] = deque(maxlen=5)

    def look(self, metrics: Metrics) -> Finding | None:
        entropy = number(metrics, "policy/entropy")
        spread = number(metrics, "reward/std")
        silent = number(metrics, GROUPS_WITHOUT_SIGNAL)
        if entropy is None or spread is None or silent is None:
            return None
        self._entropy.add(entropy, unusual=self.unusual)
        self._spread.add(spread, unusual=self.unusual)
        self._silent.append(silent)
        if not self._entropy.ready:
            return None
        level = self._entropy.level
        limit = ENTROPY_SHARE * self._entropy.start
        unsolved = self._spread.level > self._spread.start / 2
        return self.found(
            bad=level < limit and unsolved and median(self._silent) >= ENTROPY_SILENT,
            good=level > 2 * limit or not unsolved,
            value=level,
            text=f"policy/entropy {level:.3g}, at the start {self._entropy.start:.3g}",
            usual=self._entropy.usual_range(),
        )


class Stale(Check):
    """Training lags further behind generation than before."""

    name = "stale"
    opens = 5
    closes = 5

    def __init__(self, about: str) -> None:
        super().__init__(about)
        self._staleness = History(recent=5)

    def look(self, metrics: Metrics) -> Finding | None:
        staleness = number(metrics, "staleness/mean")
        if staleness is None:
            return None
        self._staleness.add(staleness, unusual=self.unusual)
        if not self._staleness.ready:
            return None
        level = self._staleness.level
        usual = self._staleness.usual
        limit = max(STALE_FACTOR * usual, usual + 1)
        return self.found(
            bad=level > limit,
            good=level < (usual + limit) / 2,
            value=level,
            text=f"staleness/mean {level:.3g}",
            usual=self._staleness.usual_range(),
        )


class Drops(Check):
    """More groups fail or become too old than before; groups that a filter drops, and stragglers, do not count."""

    name = "drops"
    opens = 5
    closes = 5

    def __init__(self, about: str, groups: int) -> None:
        """Creates the check. `groups`: number of groups of a step (`rollout.prompts_per_step`)."""
        super().__init__(about)
        self._groups = groups
        self._share = History(recent=5)

    def look(self, metrics: Metrics) -> Finding | None:
        if number(metrics, "dropped/total") is None:
            return None
        dropped = 0.0
        for name, count in metrics.items():
            reason = name.removeprefix("dropped/")
            if reason not in (name, "total") and is_failure(reason):
                dropped += count
        self._share.add(dropped / self._groups, unusual=self.unusual)
        if not self._share.ready:
            return None
        level = self._share.level
        usual = self._share.usual
        return self.found(
            bad=level > usual + DROPS_MORE,
            good=level < usual + DROPS_MORE / 2,
            value=level,
            text=f"dropped groups for each trained group: {level:.3g}",
            usual=self._share.usual_range(),
        )


class Truncated(Check):
    """Many trajectories end at the token limit."""

    name = "truncated"
    opens = 5
    closes = 5

    def __init__(self, about: str) -> None:
        super().__init__(about)
        self._share = History(recent=5)
        self._steps = 0

    def look(self, metrics: Metrics) -> Finding | None:
        share = number(metrics, "response/truncated")
        if share is None:
            return None
        self._steps += 1
        self._share.add(share, unusual=self.unusual)
        if not self._share.ready:
            return None
        level = self._share.level
        usual = self._share.usual
        most = self._steps > START and level >= CUT_SHARE
        return self.found(
            bad=most or level > usual + CUT_MORE,
            good=level < min(usual + CUT_MORE / 2, CUT_SHARE - CUT_MORE / 2),
            value=level,
            text=f"response/truncated {level:.3g}",
            usual=self._share.usual_range(),
        )


def allowed_fall(best: float, lowest: float, spread: float) -> float:
    """Returns the largest fall from the level `best` that is not bad. `lowest`: lowest level so far; `spread`: standard
    deviation of the noise."""
    return max(FALL_NOISE * spread, FALL_RANGE * (best - lowest), FALL_BEST * abs(best))


def number(metrics: Metrics, name: str) -> float | None:
    """Returns a metric; None if it is absent or not finite."""
    value = metrics.get(name)
    if value is None or not math.isfinite(value):
        return None
    return value
