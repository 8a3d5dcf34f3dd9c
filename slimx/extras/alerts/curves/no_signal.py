"""Check that most groups have a training signal."""

from __future__ import annotations

from collections import deque
from statistics import median

from slimx.errors import counted
from slimx.extras.alerts.curves.checks import Check, Metrics, number
from slimx.extras.alerts.curves.history import START, noise
from slimx.extras.alerts.finding import Finding
from slimx.observability.tracking.metrics import GROUPS_WITHOUT_SIGNAL, STEPS_WITHOUT_SIGNAL

SILENT_STEPS = 5
"""Number of consecutive steps without a training signal that opens an alert."""
RARE = 0.9
"""Fraction of groups without a signal from which on a signal counts as rare, if the reward has not risen either."""
RISEN_NOISE = 2.0
"""Multiple of the noise by which the median reward of 10 steps must exceed that of the first 20 to have risen."""
EARLY = 3
"""Number of first steps whose median reward is the level before a task that is learned within `START` steps."""
RISEN_EARLY = 0.25
"""Share of the reward of a correct answer by which the median reward of 10 steps must exceed that level to have risen.
Smaller rises must show in the steps after the first 20."""
SOLVED_SHARE = 0.1
"""Share of the reward of a correct answer by which the mean reward of solved prompts may be lower."""
SOLVED_SPREAD = 0.35
"""Largest standard deviation of the rewards of solved prompts, relative to their mean; it is 1/3 if a tenth of the
rollouts have the reward 0."""


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
        self._hopeless = 0
        """Number of consecutive steps without a signal whose prompts were not solved. `optim/steps_without_signal` also
        counts solved ones, and starts at 0 in every process."""

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
        self._hopeless = 0 if learns else self._hopeless + 1
        if self._hopeless:
            why = "because the gradient is 0"
            if silent == 1:
                why = "because all rollouts of each group have the same reward"
            text = f"no training signal for {counted(self._hopeless, 'step')}, {why}"
        elif rare:
            text = f"{GROUPS_WITHOUT_SIGNAL} {median(self._silent):.3g}, and the reward has not risen since the start"
        elif steps:
            text = "groups have no training signal, because the prompts are solved"
        else:
            text = "groups have a training signal"
        if reward is not None:
            text += f", reward/mean {reward:.3g}"
        bad = rare or self._hopeless >= SILENT_STEPS
        return self.found(bad=bad, good=learns and not rare, value=float(self._hopeless), text=text)

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
        level = median(self._rewards)
        least = RISEN_NOISE * noise(self._first)
        risen = level - median(self._first) > least
        risen |= level - median(self._first[:EARLY]) > max(least, RISEN_EARLY * abs(self._passing))
        return median(self._silent) >= RARE and not risen and median(self._solved) < 0.5
