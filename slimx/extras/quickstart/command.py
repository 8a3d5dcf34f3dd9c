"""The command `slimx quickstart`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from slimx.commands.options import Debug
from slimx.commands.usage import PlainCommand
from slimx.data.saved.step_files import DIRECTORY, step_files
from slimx.extras.quickstart.run import GRPO, commands, make, run
from slimx.observability.live.safe_text import visible

app = typer.Typer(add_completion=False)


@app.command(cls=PlainCommand)
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

    Examples:

    slimx quickstart

    slimx quickstart --steps 5 --dir try

    Page: docs/install.md
    """
    directory = directory.expanduser()
    make(directory)
    print(visible(f"made model and task in {directory / 'quickstart-data'}"), flush=True)
    for arguments in commands(directory, steps):
        print(visible(f"$ slimx {shlex.join(arguments)}"), flush=True)
        status = run(arguments)
        if status:
            sys.exit(status)  # the stage has said why; typer.Exit would say again that a signal came
    trained = directory / GRPO
    answers = f"slimx rollouts {shlex.quote(str(trained))}"
    for step in [*step_files(trained / DIRECTORY)][-1:]:  # files of earlier steps are deleted (track.rollouts.keep)
        answers += f" --step {step}"
    print(visible(f"see what the model answered: {answers}"))
