"""Command `slimx report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slimx.commands.options import Debug
from slimx.commands.usage import PlainCommand
from slimx.observability.live.safe_text import plain

app = typer.Typer(add_completion=False)


@app.command(cls=PlainCommand)
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories; runs with rollouts come first in the report.")],
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare the runs: the same charts with a curve per run, and differences.")
    ] = False,
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    debug: Debug = False,
) -> None:
    """Writes one self-contained HTML report about one or more runs: one after the other, or compared.

    Examples:

    slimx report runs/first

    slimx report --compare runs/first runs/second --out compared.html

    Page: docs/operations.md
    """
    from slimx.extras.report.report import write_comparison, write_report

    if compare:
        write_comparison(runs, out, title)
    else:
        write_report(runs, out, title or "slimx run")
    Console(soft_wrap=True).print(plain(f"report {out}"))
