"""A rule that calls the user's advantage and loss hooks with a synthetic batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slimx.config.rule import Problems, rule
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.general import Schedule
from slimx.config.sections.rollout import Rollout


@rule("algorithm.hook", "algorithm.loss")
def hooks_answer(algorithm: Algorithm, rollout: Rollout, schedule: Schedule, weights: Path) -> Problems:
    """Calls the user's advantage and loss hooks on a synthetic batch; a hook that fails raises SlimxError. The
    parameter `weights` is unused, but excludes this rule from `slimx plan`, which does not provide `weights`: hooks are
    called only when a run starts or when `slimx doctor` checks it."""
    if algorithm.hooks:
        from slimx.config.schema import Config
        from slimx.extras.doctor.effects.probe import try_hooks  # imports torch, which `slimx plan` does not need

        sections: dict[str, Any] = {"algorithm": algorithm, "rollout": rollout, "schedule": schedule}
        try_hooks(Config.model_construct(**sections))
    yield from ()
