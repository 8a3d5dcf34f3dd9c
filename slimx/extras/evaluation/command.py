"""The command `slimx eval`."""

from __future__ import annotations

import json
import sys

import typer

from slimx.commands.options import AsJson, Checkpoint, Debug, Overrides, RunFile
from slimx.commands.usage import RayCommand
from slimx.config.load import load_config
from slimx.observability.live.safe_text import one_line, visible

app = typer.Typer(add_completion=False)


@app.command(cls=RayCommand)
def evaluate(
    file: RunFile,
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Evaluate a checkpoint on the held-out prompts of FILE and report mean reward and pass@k of each set. Only engines
    are started.

    Examples:

    slimx eval run.yaml

    slimx eval run.yaml --checkpoint runs/first/hf/step_100 --json

    Page: docs/rollouts.md
    """
    print(f"checking {one_line(file)}", file=sys.stderr, flush=True)
    config = load_config(file, overrides or [])
    from slimx.extras.evaluation.checks import evaluation_config

    config = evaluation_config(config, checkpoint)
    from slimx.extras.evaluation.run import run_evaluation, table  # imports torch, which the checks do not need

    result = run_evaluation(config, lambda text: print(text, file=sys.stderr))
    if as_json:
        print(visible(json.dumps(result, indent=1)))
        return
    for line in table(result):
        print(visible(line))
