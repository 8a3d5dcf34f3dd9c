"""`slimx watch` and `slimx report` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slimx.commands.options import Debug
from slimx.observability.live.safe_text import plain

app = typer.Typer(add_completion=False)
report_app = typer.Typer(add_completion=False)


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8890,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    debug: Debug = False,
) -> None:
    """Serve a live page about a run: what it does now, curves, time, rollouts token by token. Ctrl-C ends it."""
    from slimx.extras.watch.page.server import serve

    serve(run, host, port, lambda text: print(text, flush=True))


@report_app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories; those with rollouts come first.")],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Title of the page.")] = "slimx run",
    debug: Debug = False,
) -> None:
    """Write one self-contained HTML report of one or more runs."""
    from slimx.extras.watch.report.report import write_report

    write_report(runs, out, title)
    Console(soft_wrap=True).print(plain(f"report {out}"))
