"""`slimx pack`: an archive for a bug report."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from slimx.commands.options import Debug
from slimx.commands.usage import PlainCommand
from slimx.observability.live.safe_text import visible

app = typer.Typer(add_completion=False)


@app.command(cls=PlainCommand)
def pack(
    run: Annotated[Path, typer.Argument(help="Run directory, or the YAML file of a run that was refused.")],
    out: Annotated[
        Path | None, typer.Option(help="Archive to write; default: slimx-RUN-TIME.tar.gz in this directory.")
    ] = None,
    rollouts: Annotated[
        int,
        typer.Option(min=0, max=100, help="Number of samples and of groups to add; they are private data."),
    ] = 0,
    debug: Debug = False,
) -> None:
    """Writes an archive for a bug report: configuration, metrics, events, ends of logs and versions, without weights,
    secrets, and names of users and machines. Prints what it contains.

    Examples:

    slimx pack runs/first

    slimx pack runs/first --rollouts 2 --out report.tar.gz

    Page: docs/operations.md
    """
    from slimx.extras.pack.archive import pack as write_archive

    packed = write_archive(run, out, rollouts, os.environ)
    for member in packed.members:
        print(visible(f"{len(member.data):>12,}  {member.name}  {member.note}".rstrip()))
    for file in packed.left_out:
        print(visible(f"    left out  {file.name}: {file.why}"))
    print(f"secrets and names removed: {packed.removed}")
    if not rollouts:
        print("rollouts and samples are not in the archive, because they are private; --rollouts N adds N of them")
    print(visible(f"archive {packed.file}, {packed.file.stat().st_size:,} bytes; read it before you send it"))
