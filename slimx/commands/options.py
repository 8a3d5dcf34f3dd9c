"""Arguments and options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFile = Annotated[Path, typer.Argument(help="YAML file of the run.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value, applied in order.")]
Checkpoint = Annotated[
    Path | None, typer.Option(help="Hugging Face directory that engines start from; else as training would.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
