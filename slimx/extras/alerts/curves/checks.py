"""Checks of single metrics. Each check gets the metrics of every step and returns a finding, or None if the metric is
absent or its history is too short."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping
from statistics import median

from slimx.extras.alerts.curves.history import START, History, noise
from slimx.extras.alerts.finding import Finding, Gate
from slimx.observability.tracking.metrics import GROUPS_WITHOUT_SIGNAL, STEPS_WITHOUT_SIGNAL
from slimx.rollout.flow.rollouts import is_failure

Metrics = Mapping[str, float]

SILENT_STEPS = 5
"""Number of consecutive steps without a training signal that opens an alert."""
RARE = 0.9
"""Fraction of groups without a signal from which on a signal counts as rare, if the reward has not risen either."""
RISEN_NOISE = 2.0
"""Multiple of the noise by which the median reward of 10 steps must exceed that of the first 20 to have risen."""
SOLVED_SHARE = 0.1
"""Share of the reward of a correct answer by which the mean reward of solved prompts may be lower."""
SOLVED_SPREAD = 0.35
"""Largest standard deviation of the rewards of solved prompts, relative to their mean; it is 1/3 if a tenth of the
rollouts have the reward 0."""
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


class NoSignal(Check):
    """All rollouts of each group have the same reward, or the gradient is 0, in several steps in a row; or almost all
    groups have no signal in many steps, and the reward has not risen since the start. Groups whose rollouts are all
    correct do not count, because a solved task is no fault."""

    name = "no_signal"
    opens = 1
    closes = 3

    def __init__(self, about: str, passing: float) -> None:
        """Creates the check. `passing`: minimum reward of a correct answer (`eval.passing`)."""
        super().__init__(about)
        self._passing = passing
        self._silent: deque[float] = deque(maxlen=10)
        self._rewards: deque[float] = deque(maxlen=10)
        self._solved: deque[bool] = deque(maxlen=10)
        self._first: list[float] = []

    def look(self, metrics: Metrics) -> Finding | None:
        steps = number(metrics, STEPS_WITHOUT_SIGNAL)
        if steps is None:
            return None
        silent = number(metrics, GROUPS_WITHOUT_SIGNAL)
        reward = number(metrics, "reward/mean")
        rare = False
        solved = False
        if silent is not None and reward is not None:
            solved = self._is_solved(reward, number(metrics, "reward/std"))
            rare = self._is_rare(silent, reward, solved)
        # A gradient of 0 is a fault if some groups have a signal.
        learns = steps == 0 or (solved and silent == 1)
        if steps and learns:
            text = "groups have no training signal, because the prompts are solved"
        elif steps == 0 and not rare:
            text = "groups have a training signal"
        elif steps:
            why = "because the gradient is 0"
            if silent == 1:
                why = "because all rollouts of each group have the same reward"
            text = f"no training signal for {steps:.0f} steps, {why}"
        else:
            text = f"{GROUPS_WITHOUT_SIGNAL} {median(self._silent):.3g}, and the reward has not risen since the start"
        if reward is not None:
            text += f", reward/mean {reward:.4g}"
        bad = rare or (steps >= SILENT_STEPS and not learns)
        return self.found(bad=bad, good=learns and not rare, value=steps, text=text)

    def _is_solved(self, reward: float, spread: float | None) -> bool:
        """Returns True if almost all rollouts of a step are correct. `reward` and `spread`: mean and standard deviation
        of their rewards; None if it is unknown."""
        enough = self._passing - SOLVED_SHARE * abs(self._passing)
        return reward >= enough and spread is not None and spread <= SOLVED_SPREAD * abs(reward)

    def _is_rare(self, silent: float, reward: float, solved: bool) -> bool:
        """Adds a step, and returns True if almost all groups of the last steps had no signal, the reward is no better
        than in the first ones, and the prompts are not solved."""
        self._silent.append(silent)
        self._rewards.append(reward)
        self._solved.append(solved)
        if len(self._first) < START:
            self._first.append(reward)
            return False
        # The first values alone are the level at the start of a task that is learned within 10 steps.
        start = min(median(self._first), median(self._first[:3]))
        risen = median(self._rewards) - start > RISEN_NOISE * noise(self._first)
        return median(self._silent) >= RARE and not risen and median(self._solved) < 0.5


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
        self._values: list[float] = []

    def look(self, metrics: Metrics) -> Finding | None:
        reward = number(metrics, self.metric)
        if reward is None:
            return None
        self._values.append(reward)
        earlier = self._values[:-2]
        if len(earlier) < EVALUATIONS:
            return None
        # Of three values, so that one lucky evaluation is not the best level.
        best = max(median(earlier[start : start + 3]) for start in range(len(earlier) - 2))
        level = max(self._values[-2:])
        allowed = allowed_fall(best, min(self._values), max(noise(earlier), noise(self._values)))
        return self.found(
            bad=best - level > allowed,
            good=best - reward < allowed / 2,
            value=reward,
            text=f"{self.metric} {reward:.3g}, its best was {best:.3g}",
            usual=f"{best - allowed:.3g} to {best:.3g}",
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
