"""Evaluation from a script or a notebook: `slimx.evaluate(config, checkpoint)`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from slimx.commands.script import alone, with_hooks
from slimx.config.schema import Config
from slimx.extras.evaluation.checks import evaluation_config
from slimx.json_types import Json
from slimx.rollout.hooks import Generate, Reward


def evaluate(
    config: Config,
    checkpoint: str | Path | None = None,
    *,
    generate: Generate | None = None,
    reward: Reward | None = None,
    note: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> Json:
    """Evaluates on the held-out prompts as `slimx eval` does and returns {checkpoint, prompts, metrics, ...}.

    `checkpoint`: a Hugging Face directory; None: the run's initial weights. `generate`, `reward`: hooks, as in `train`.
    `note`: receives lines of text about the progress. Raises the same errors as `train`."""
    config = with_hooks(config, generate=generate, reward=reward)
    with alone():
        config = evaluation_config(config, None if checkpoint is None else Path(checkpoint).expanduser())
        from slimx.extras.evaluation.run import run_evaluation  # imports torch, which the checks do not need

        return run_evaluation(config, note)
