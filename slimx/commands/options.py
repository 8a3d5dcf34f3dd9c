"""Arguments and options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFile = Annotated[Path, typer.Argument(help="YAML file of the run.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value, applied in order.")]
Checkpoint = Annotated[
    Path | None,
    typer.Option(help="Hugging Face checkpoint for the engines; default: the one that training would start from."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
