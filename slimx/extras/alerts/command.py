"""`slimx alerts`: the open and past alerts of a run, from its directory alone."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from slimx.commands.options import AsJson, Debug
from slimx.commands.usage import PlainCommand
from slimx.extras.alerts.log import alert_lines, alerts_of
from slimx.observability.live.safe_text import visible

app = typer.Typer(add_completion=False)
OPEN_STATUS = 6
"""Exit status of --check if an alert is open."""


@app.command(cls=PlainCommand)
def alerts(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    as_json: AsJson = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with 6 if an alert is open, 2: no run found.")] = False,
    debug: Debug = False,
) -> None:
    """Lists the open and past alerts of a run, with the value, its usual range and what to do, using only its
    directory.

    Examples:

    slimx alerts runs/first

    slimx alerts runs/first --check

    Page: docs/operations.md
    """
    found = alerts_of(run)
    if as_json:
        print(json.dumps(list(map(asdict, found)), indent=1))
    else:
        print(visible("\n".join(alert_lines(found))))
    if check and any(alert.closed is None for alert in found):
        raise typer.Exit(OPEN_STATUS)
