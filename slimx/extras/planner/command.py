"""The command `slimx plan`, which describes a run before it starts."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from slimx.commands.options import AsJson, Debug, Overrides, RunFile
from slimx.commands.usage import RunCommand
from slimx.config.load import load_config
from slimx.observability.live.safe_text import one_line, visible

app = typer.Typer(add_completion=False)


@app.command(cls=RunCommand)
def plan(
    file: RunFile,
    overrides: Overrides = None,
    predict: Annotated[
        bool,
        typer.Option(
            "--predict",
            help="Predict a publication's time on clusters, after testing the model here (3 s).",
        ),
    ] = False,
    suggest: Annotated[
        bool,
        typer.Option(
            "--suggest",
            help="Search layouts that fit the memory of cluster.gpu, fastest first.",
        ),
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Describe the run of FILE from its configuration and the model's config.json alone. Needs no weights and no
    GPU.

    Examples:

    slimx plan run.yaml

    slimx plan run.yaml cluster.gpu=h200 cluster.nodes=2 --suggest

    slimx plan run.yaml --json

    Exit codes: 0 no known problem, 2 each problem is printed as a sentence.

    Page: docs/planning.md
    """
    config = load_config(file, overrides or [])
    from slimx.extras.planner.planning import run_plan

    output = run_plan(config, predict=predict, suggest=suggest, as_json=as_json)
    for line in output.lines:
        print(visible(line))
    for sentence in output.violations:
        print(f"slimx: {one_line(sentence)}", file=sys.stderr)
    if output.violations:
        raise typer.Exit(2)
