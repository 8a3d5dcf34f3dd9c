"""Checks of `slimx eval`, which need neither torch nor a model."""

from __future__ import annotations

from pathlib import Path

from slimx.config.schema import Config
from slimx.errors import SlimxError
from slimx.extras.generation.checks import without_trainers
from slimx.observability.live.run_lock import check_usable
from slimx.orchestration.start.checks import check_parts

EVALUATIONS = "eval"
"""Subdirectory of a run's directory to which `slimx eval` writes the engines' logs and, in `results.jsonl`, one line
per evaluation."""


def evaluation_config(config: Config, checkpoint: Path | None, option: str = "--checkpoint") -> Config:
    """Returns the configuration for `slimx eval`, whose engines load `checkpoint`. `option`: name of `checkpoint` for
    errors. Raises SlimxError if the evaluation cannot start."""
    options = config.eval.model_copy(update={"every": None})  # a run may have eval.prompts without eval.every
    config = without_trainers(config.model_copy(update={"eval": options}), checkpoint, option)
    if not config.eval.files:
        raise SlimxError(
            "eval.prompts is null, so there is nothing to evaluate; set eval.prompts to a file of prompts",
            code="eval.prompts",
            about="eval.prompts",
        )
    check_usable(Path(config.run.dir) / EVALUATIONS)
    check_parts(config)
    return config
