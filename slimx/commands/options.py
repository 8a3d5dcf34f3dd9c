"""Command-line arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slimx import entry_points


def complete(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Returns completions of the override `incomplete` for a shell, each with its description."""
    return entry_points.load("slimx.completions", "overrides")(ctx, incomplete)


RunFile = Annotated[Path, typer.Argument(help="YAML file with the run's configuration.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        autocompletion=complete,
        help="Overrides of the file, section.key=value, applied in order; section.key+=value appends to a list.",
    ),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(help="Hugging Face checkpoint for the engines; default: the run's initial weights."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Debug = Annotated[bool, typer.Option("--debug", help="Also print the traceback of an error.")]
