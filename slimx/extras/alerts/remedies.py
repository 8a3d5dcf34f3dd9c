"""Remedy of each alert, with the section of the documentation that says more."""

from __future__ import annotations

from typing import get_args

from slimx.extras.alerts.section import AlertName

GUIDE = "docs/guides/when-it-goes-wrong.md"
RUNBOOK = "docs/runbook.md"
NAMES: tuple[str, ...] = get_args(AlertName)
"""Names of all alerts."""
REMEDIES: dict[str, str] = {
    "no_signal": f"change the prompts, the reward or the group size; see {GUIDE}#groups-without-a-signal",
    "gap": f"run slimx doctor FILE --gap --layers; see {GUIDE}#the-gap-grows",
    "reward_fell": f"stop, and fork from a checkpoint before the fall; see {GUIDE}#the-reward-collapses",
    "heldout_fell": f"read the rollouts with the highest reward; see {GUIDE}#the-reward-collapses",
    "entropy": f"raise algorithm.loss high or lower the learning rate; see {GUIDE}#entropy-collapses",
    "truncated": f"raise rollout.sampling.max_new_tokens or add the reward overlong; see {GUIDE}#lengths-explode",
    "stale": f"lower schedule.max_staleness or add engines; see {RUNBOOK}#alerts",
    "drops": f"read the reasons in RUN/dropped.jsonl; see {RUNBOOK}#alerts",
    "disk": f"free disk space before the next checkpoint; see {RUNBOOK}#disk",
    "gpu": f"check the cooling and power of the node with slimx health; see {RUNBOOK}#alerts",
}
"""Remedy of each alert, as an imperative clause."""
