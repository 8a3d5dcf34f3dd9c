"""The command `slimx generate`."""

from __future__ import annotations

import typer
from rich.console import Console

from slimx.commands.options import Checkpoint, Debug, Overrides, RunFile
from slimx.commands.usage import RayCommand
from slimx.config.load import load_config
from slimx.observability.live.safe_text import plain

app = typer.Typer(add_completion=False)


@app.command(cls=RayCommand)
def generate(
    file: RunFile,
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
    debug: Debug = False,
) -> None:
    """Generate the rollouts of the run in FILE without training: only engines are started, and each step is saved.

    Examples:

    slimx generate run.yaml run.dir=runs/samples schedule.steps=1

    slimx generate run.yaml --checkpoint runs/first/hf/step_100

    Page: docs/rollouts.md
    """
    console = Console(soft_wrap=True)
    console.print(plain(f"checking {file}"))
    config = load_config(file, overrides or [])
    from slimx.extras.generation.checks import generation_config

    config = generation_config(config, checkpoint)
    from slimx.extras.generation.run import run_generation  # imports torch, which the checks do not need

    directory = run_generation(config, console)
    console.print(plain(f"rollouts {directory}"))
