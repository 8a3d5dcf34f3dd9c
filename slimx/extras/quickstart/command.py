"""The command `slimx quickstart`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from slimx.commands.options import Debug
from slimx.extras.quickstart.run import commands, make, run
from slimx.observability.live.safe_text import visible

app = typer.Typer(add_completion=False)


@app.command()
def quickstart(
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Steps of GRPO, after four times as many of fine-tuning; default: 100 after 400."),
    ] = None,
    directory: Annotated[Path, typer.Option("--dir", help="Directory below which data and runs are written.")] = Path(
        "runs"
    ),
    debug: Debug = False,
) -> None:
    """Train a tiny MoE by GRPO on this machine's CPU, without a download: 3 minutes on two cores.

    Makes a model and a task, fine-tunes the model on demonstrations, trains it by GRPO, and writes a report. Repeat the
    command to continue a run that was stopped.
    """
    make(directory)
    print(visible(f"made model and task in {directory / 'quickstart-data'}"), flush=True)
    for arguments in commands(directory, steps):
        print(visible(f"$ slimx {shlex.join(arguments)}"), flush=True)
        status = run(arguments)
        if status:
            raise typer.Exit(status)
    print(visible(f"see what the model answered: slimx rollouts {directory / 'quickstart'} --step 1"))
