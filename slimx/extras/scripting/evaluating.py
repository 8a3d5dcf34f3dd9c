"""Evaluation from a script or a notebook: `slimx.evaluate(config, checkpoint)`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from slimx.config.load import Overrides
from slimx.config.schema import Config
from slimx.extras.evaluation.checks import evaluation_config
from slimx.extras.scripting.alone import alone
from slimx.extras.scripting.functions import Hook, with_hooks
from slimx.extras.scripting.training import configured
from slimx.json_types import Json


def evaluate(
    source: str | Path | Mapping[str, object] | Config,
    checkpoint: str | Path | None = None,
    overrides: Overrides = (),
    *,
    generate: Hook | None = None,
    reward: Hook | None = None,
    note: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> Json:
    """Evaluates on the held-out prompts as `slimx eval` does and returns {checkpoint, prompts, metrics, ...}.

    `source`, `overrides`: as for `slimx.load_config`. `checkpoint`: a Hugging Face directory; None: the run's initial
    weights. `generate`, `reward`: hooks, as for `slimx.train`. `note`: receives lines of text about the progress.
    Raises the same errors as `slimx.train`."""
    config = with_hooks(configured(source, overrides), generate=generate, reward=reward)
    with alone():
        path = None if checkpoint is None else Path(checkpoint).expanduser()
        config = evaluation_config(config, path, "checkpoint")
        from slimx.extras.evaluation.run import run_evaluation  # imports torch, which the checks do not need

        return run_evaluation(config, note)
