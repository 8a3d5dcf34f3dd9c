"""Command-line arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFile = Annotated[Path, typer.Argument(help="YAML file with the run's configuration.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Overrides of the file, section.key=value, applied in order."),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(help="Hugging Face checkpoint that the engines load; default: the initial weights of the run."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Debug = Annotated[bool, typer.Option("--debug", help="Also print the traceback of an error.")]
