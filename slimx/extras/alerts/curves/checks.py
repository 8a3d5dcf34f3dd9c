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


class LevelCheck(Check):
    """Check of the level of one metric, the median of its last 5 values, against its usual range."""

    opens = 5
    closes = 5
    metric: str

    def __init__(self, about: str) -> None:
        super().__init__(about)
        self.history = History(recent=5)

    @abstractmethod
    def judged(self, level: float) -> tuple[bool, bool]:
        """Returns whether `level` is bad, and whether it is good."""

    def value(self, metrics: Metrics) -> float | None:
        """Returns the value of a step; None if it is absent."""
        return number(metrics, self.metric)

    def text(self, level: float) -> str:
        """Returns the metric and its level as the finding shows them."""
        return f"{self.metric} {level:.3g}"

    def look(self, metrics: Metrics) -> Finding | None:
        value = self.value(metrics)
        if value is None:
            return None
        self.history.add(value, unusual=self.unusual)
        if not self.history.ready:
            return None
        level = self.history.level
        bad, good = self.judged(level)
        return self.found(bad=bad, good=good, value=level, text=self.text(level), usual=self.history.usual_range())


class Gap(LevelCheck):
    """The log-probs of trainer and engine differ more than before."""

    name = "gap"
    metric = "gap/mean"

    def judged(self, level: float) -> tuple[bool, bool]:
        usual = min(self.history.usual, self.history.start)
        return level > max(GAP_FACTOR * usual, GAP_FLOOR), level < max(GAP_FACTOR / 2 * usual, GAP_FLOOR)


class FallCheck(Check):
    """Check that a reward has not fallen far below its best level."""

    metric: str

    def __init__(self, about: str) -> None:
        super().__init__(about)
        self.values: deque[float] = deque(maxlen=USUAL)
        self.best = -math.inf
        self.lowest = math.inf

    def judged(self, level: float, fall: float, spread: float) -> Finding:
        """Returns the finding about `level`. `fall`: distance by which the reward certainly is below its best level;
        `spread`: standard deviation of the noise."""
        allowed = max(FALL_NOISE * spread, FALL_RANGE * (self.best - self.lowest), FALL_BEST * abs(self.best))
        return self.found(
            bad=fall > allowed,
            good=self.best - level < allowed / 2,
            value=level,
            text=f"{self.metric} {level:.3g}, its best was {self.best:.3g}",
            usual=f"{self.best - allowed:.3g} to {self.best:.3g}",
        )


class RewardFell(FallCheck):
    """The reward fell from its best level and stays low."""

    name = "reward_fell"
    opens = 10
    closes = 5
    metric = "reward/mean"

    def look(self, metrics: Metrics) -> Finding | None:
        reward = number(metrics, self.metric)
        if reward is None:
            return None
        self.values.append(reward)
        values = list(self.values)
        if len(values) < 10:
            return None
        level = median(values[-10:])
        self.best = max(self.best, level)
        self.lowest = min(self.lowest, level)
        if len(values) < START:
            return None
        return self.judged(level, self.best - level, noise(values))


class HeldOutFell(FallCheck):
    """Two evaluations in a row are far below the best one."""

    name = "heldout_fell"
    opens = 1
    closes = 1

    def __init__(self, about: str, metric: str) -> None:
        super().__init__(about)
        self.metric = metric

    def look(self, metrics: Metrics) -> Finding | None:
        reward = number(metrics, self.metric)
        if reward is None:
            return None
        self.values.append(reward)
        self.lowest = min(self.lowest, reward)
        values = list(self.values)
        earlier = values[:-2]
        if len(earlier) >= 3:  # a median, so that one lucky evaluation is not the best level
            self.best = max(self.best, median(earlier[-3:]))
        if len(earlier) < EVALUATIONS:
            return None
        return self.judged(reward, self.best - max(values[-2:]), max(noise(earlier), noise(values)))


class Entropy(LevelCheck):
    """The entropy fell to a fraction of that at the start, and rollouts of a group have become equal, although rewards
    of different prompts still differ. A model that has learned all prompts is no collapse."""

    name = "entropy"
    metric = "policy/entropy"

    def __init__(self, about: str) -> None:
        super().__init__(about)
        self._spread = History(recent=5)
        self._silent: deque[float] = deque(maxlen=5)

    def value(self, metrics: Metrics) -> float | None:
        spread = number(metrics, "reward/std")
        silent = number(metrics, GROUPS_WITHOUT_SIGNAL)
        entropy = super().value(metrics)
        if entropy is None or spread is None or silent is None:
            return None
        self._spread.add(spread, unusual=self.unusual)
        self._silent.append(silent)
        return entropy

    def text(self, level: float) -> str:
        return f"{super().text(level)}, at the start {self.history.start:.3g}"

    def judged(self, level: float) -> tuple[bool, bool]:
        limit = ENTROPY_SHARE * self.history.start
        unsolved = self._spread.level > self._spread.start / 2
        return (
            level < limit and unsolved and median(self._silent) >= ENTROPY_SILENT,
            level > 2 * limit or not unsolved,
        )


class Stale(LevelCheck):
    """Training lags further behind generation than before."""

    name = "stale"
    metric = "staleness/mean"

    def judged(self, level: float) -> tuple[bool, bool]:
        usual = self.history.usual
        limit = max(STALE_FACTOR * usual, usual + 1)
        return level > limit, level < (usual + limit) / 2


class Drops(LevelCheck):
    """More groups fail or become too old than before; groups that a filter drops, and stragglers, do not count."""

    name = "drops"
    metric = "dropped/total"

    def __init__(self, about: str, groups: int) -> None:
        """Creates the check. `groups`: number of groups of a step (`rollout.prompts_per_step`)."""
        super().__init__(about)
        self._groups = groups

    def value(self, metrics: Metrics) -> float | None:
        if super().value(metrics) is None:
            return None
        dropped = 0.0
        for name, count in metrics.items():
            reason = name.removeprefix("dropped/")
            if reason not in (name, "total") and is_failure(reason):
                dropped += count
        return dropped / self._groups

    def text(self, level: float) -> str:
        return f"dropped groups for each trained group: {level:.3g}"

    def judged(self, level: float) -> tuple[bool, bool]:
        usual = self.history.usual
        return level > usual + DROPS_MORE, level < usual + DROPS_MORE / 2


class Truncated(LevelCheck):
    """Many trajectories end at the token limit."""

    name = "truncated"
    metric = "response/truncated"

    def __init__(self, about: str) -> None:
        super().__init__(about)
        self._steps = 0

    def value(self, metrics: Metrics) -> float | None:
        share = super().value(metrics)
        self._steps += share is not None
        return share

    def judged(self, level: float) -> tuple[bool, bool]:
        usual = self.history.usual
        most = self._steps > START and level >= CUT_SHARE
        good = level < min(usual + CUT_MORE / 2, CUT_SHARE - CUT_MORE / 2)
        return most or level > usual + CUT_MORE, good


def number(metrics: Metrics, name: str) -> float | None:
    """Returns a metric; None if it is absent or not finite."""
    value = metrics.get(name)
    if value is None or not math.isfinite(value):
        return None
    return value
