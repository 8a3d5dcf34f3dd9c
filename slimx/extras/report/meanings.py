"""Texts of cards and charts: the meaning of a metric, from slimx's table of metrics, its good values, and its values as
text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from slimx.config.sections.policies import policy_of
from slimx.errors import duration
from slimx.observability.tracking.names import find


class Best(StrEnum):
    """Value of a metric that is the best of a run, for a comparison of runs."""

    HIGHEST = "highest"
    LOWEST = "lowest"
    NONE = ""
    """For metrics that only have to be steady, or that depend on the task."""


@dataclass(frozen=True, slots=True)
class Good:
    """Good values of a metric: in words, and which value of a run is the best."""

    text: str
    best: Best = Best.NONE


GOOD: Mapping[str, Good] = {
    "reward/mean": Good("High: it rises over the run, in the range of the reward function.", Best.HIGHEST),
    "reward/groups_without_signal": Good("Low: well below 1, because such groups teach nothing.", Best.LOWEST),
    "reward/part/{part}/mean": Good("High, unless the part is a penalty.", Best.HIGHEST),
    "source/{source}/reward": Good("High: it rises over the run.", Best.HIGHEST),
    "hook/{name}/mean": Good("Depends on the number that the hook logs."),
    "response/mean_tokens": Good("Steady, or slowly changing; a rise together with truncated responses is a warning."),
    "response/max_tokens": Good("Below `rollout.sampling.max_new_tokens` per turn."),
    "response/passed_mean_tokens": Good("Steady; compare it with the length of failed answers."),
    "response/failed_mean_tokens": Good("Not much above the length of passed answers."),
    "response/truncated": Good("Near 0: longer answers need a larger `rollout.sampling.max_new_tokens`.", Best.LOWEST),
    "rollout/turns_mean": Good("Depends on the task; 1 without tools or an environment."),
    "rollout/turns_max": Good("Depends on the task; 1 without tools or an environment."),
    "dropped/total": Good("Near 0, unless a filter drops groups on purpose.", Best.LOWEST),
    "staleness/mean": Good("Low: at most `schedule.max_staleness`, and 0 if that is 0.", Best.LOWEST),
    "staleness/max": Good("Low: at most `schedule.max_staleness`, and 0 if that is 0.", Best.LOWEST),
    "eval/accuracy": Good("High: it rises with the reward; a fall while the reward rises is a warning.", Best.HIGHEST),
    "eval/{set}/accuracy": Good("High: it rises with the reward.", Best.HIGHEST),
    "eval/pass@{k}": Good("High.", Best.HIGHEST),
    "eval/failed": Good("0.", Best.LOWEST),
    "loss/policy": Good("Near 0, with either sign: it need not fall, so judge the reward instead."),
    "loss/sft": Good("Low: it falls, first fast and then slowly.", Best.LOWEST),
    "loss/clip_fraction": Good(
        "Low: 0 if a step has a single update; a rise means that the policy moves far within a step."
    ),
    "policy/entropy": Good("Falls slowly: near 0, answers of a group become identical; a steady rise is a warning."),
    "kl/reference": Good("Low: it starts at 0 and grows slowly."),
    "preference/loss": Good("Low: it falls; 0.69 is chance.", Best.LOWEST),
    "preference/accuracy": Good("High: 0.5 is chance.", Best.HIGHEST),
    "value/loss": Good("Low: it falls, in the units of squared returns.", Best.LOWEST),
    "value/clip_fraction": Good("Near 0.", Best.LOWEST),
    "value/explained_variance": Good("High: 0 is no better than a constant, and 1 is perfect.", Best.HIGHEST),
    "gap/mean": Good(
        "Near 0 and flat: only rounding remains, 1e-7 to 1e-6 in float32, 1e-3 to 1e-2 in bfloat16, 0 in exact mode.",
        Best.LOWEST,
    ),
    "gap/max": Good("Near 0 and flat; in an MoE model, a token routed to other experts may raise it.", Best.LOWEST),
    "gap/tokens_above_1e-5": Good("Low in float32; in bfloat16, rounding exceeds 1e-5 for most tokens.", Best.LOWEST),
    "gap/tokens_other_routes": Good("Low: a small share of `gap/tokens`.", Best.LOWEST),
    "gap/tokens_unexplained": Good(
        "Near 0 in float32: a few tokens in a run are rounding. In bfloat16, most tokens exceed 1e-5.", Best.LOWEST
    ),
    "mismatch/ess": Good("Near 1.", Best.HIGHEST),
    "mismatch/ratio": Good("Near 1."),
    "router/imbalance": Good("Near 1, which is a perfect balance of experts.", Best.LOWEST),
    "optim/grad_norm": Good("Steady: spikes before a fall of the reward are a warning."),
    "optim/lr": Good("Follows the schedule of `trainer.optimizer`."),
    "optim/skipped": Good("0.", Best.LOWEST),
    "optim/zero_gradient": Good("0.", Best.LOWEST),
    "critic/{measure}": Good("As for the policy's metric `optim/{measure}`."),
    "batch/padding": Good("Low.", Best.LOWEST),
    "batch/imbalance": Good("Near 0.", Best.LOWEST),
    "publish/{stage}_seconds": Good("Low: a small part of the step.", Best.LOWEST),
    "engines/quarantined": Good("0.", Best.LOWEST),
    "engines/lost": Good("0.", Best.LOWEST),
    "perf/tokens_per_second": Good("High and steady; it depends on model and hardware.", Best.HIGHEST),
    "memory/{phase}_peak_mib": Good("Below the memory of the device, with a margin.", Best.LOWEST),
    "time/step": Good("Low and steady.", Best.LOWEST),
    "time/{phase}": Good("Low: no phase dominates the step while other parts wait.", Best.LOWEST),
}
"""Good values by the name of the entry in the table of metrics. docs/metrics.md contains the texts."""

TERMS: Mapping[str, str] = {
    "publication (weight sync)": "Transfer of the trainers' new weights to the engines; the phase `publish`.",
    "version": "Number of a set of published weights: step n publishes version n.",
    "gap (train-inference mismatch)": "Difference between the log-probs that trainer and engine compute for a sampled "
    "token with the same weights.",
    "staleness (off-policy lag)": "Number of versions by which the weights that sampled a token are older than the "
    "trainer's.",
    "rollout, group": "One answer (episode) to a prompt, and all answers to the same prompt in a step.",
    "dropped group": "Group that is not trained, because a rollout failed or a filter removed it.",
    "held-out prompts": "Prompts of `eval.prompts` (evaluation set), which are never trained.",
    "phase, track": "Part of a step that is timed, and the process or activity to which it belongs.",
}
"""Terms that the pages use, with the usual words for them."""

_SECONDS = re.compile(r"(policy/[^/]+/)?time/.+|.+[_/]seconds")
"""Pattern of the names of metrics that are durations in seconds."""
_OF_CRITIC = re.compile(r"critic/(?=grad_norm|lr|skipped|zero_gradient)")


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Explanation of one metric on a card or in a chart."""

    label: str
    """Name of the curve in the chart's legend; "" for a card or chart of a single metric."""
    metric: str
    """Name of the metric in metrics.jsonl, or of its entry in the table of metrics."""
    meaning: str
    """Sentence about what the metric is."""
    good: str
    """Sentence about good values; "" if they are unknown."""

    @property
    def section(self) -> str:
        """Section of docs/metrics.md that describes the metric."""
        return _of_actor(self.metric).partition("/")[0]

    def to_json(self) -> dict[str, str]:
        """Returns the texts as the live page draws them."""
        return {
            "label": self.label,
            "metric": self.metric,
            "meaning": self.meaning,
            "good": self.good,
            "section": self.section,
        }


def about(metric: str, label: str = "") -> About:
    """Returns the explanation of `metric`. For a critic, or a policy other than the actor, it is that of the actor's
    metric. The text about a metric that is not in the table of metrics says that the run's own code logs it."""
    entry = find(_of_actor(metric))
    meaning = "Logged by the run's own code." if entry is None else entry.meaning
    return About(label=label, metric=metric, meaning=meaning, good=good(metric).text)


def good(metric: str) -> Good:
    """Returns the good values of `metric`; without text if they are unknown."""
    entry = find(_of_actor(metric))
    return GOOD.get("" if entry is None else entry.name, Good(""))


def shown(metric: str, value: float) -> str:
    """Formats a value of `metric`: with a unit if it is a duration."""
    return duration(value) if _SECONDS.fullmatch(metric) and math.isfinite(value) else digits(value)


def digits(value: float) -> str:
    """Formats a number with three significant digits, or with all integer digits if it is at least 1,000 and below a
    billion. A boolean is `yes` or `no`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) or (math.isfinite(value) and 999.5 <= abs(value) < 1e9):
        return f"{value:,.0f}"
    return f"{value:z.3g}"


def _of_actor(metric: str) -> str:
    """Returns the name of the actor's metric for a metric of a critic or of another policy."""
    return _OF_CRITIC.sub("optim/", policy_of(metric)[1])
