"""Mistakes with the directories of runs: where they go on, fork and write."""

from __future__ import annotations

from tools.docs.wrong_inputs.hooks import REWARD
from tools.docs.wrong_inputs.mistake import RUN, Mistake, hooks

RUNS = (
    Mistake("a run that must go on, and never began", "train run.yaml run.resume=must"),
    Mistake("a run that must not go on", "train run.yaml run.resume=never", {"runs/sums/metrics.jsonl": ""}),
    Mistake("a fork of a run instead of its checkpoint", "train run.yaml run.fork=runs/old", {"runs/old/a": ""}),
    Mistake("an unwritable run.dir", "train run.yaml run.dir=/proc/sums"),
    Mistake(
        "an unwritable publish.directory", "train run.yaml publish.transport=disk publish.directory=/proc/published"
    ),
    Mistake(
        "three wrong paths",
        "train run.yaml model.path=modle rollout.prompts=prompts.json reward.function=hoooks.rises",
        hooks(REWARD),
    ),
    Mistake(
        "a step whose rollouts are no longer saved",
        "rollouts runs/sums --step 1",
        {"runs/sums/config.yaml": RUN, "runs/sums/rollouts/step-0000091.groups": b""},
    ),
    Mistake("a file as run.dir", "train run.yaml run.dir=prompts.jsonl"),
    Mistake("a tracker that is not installed", "train run.yaml track.wandb=true"),
)
