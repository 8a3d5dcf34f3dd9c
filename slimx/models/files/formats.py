"""Forms of initial weights other than Hugging Face directories: entry points of `slimx.checkpoint_formats`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from slimx import entry_points


class CheckpointFormat(Protocol):
    """A form of checkpoint directories that a run may start from."""

    name: str
    """Program that writes them."""

    def recognises(self, directory: Path) -> bool:
        """Return True if `directory` has this form."""
        ...

    def check(self, directory: Path, spec: Any) -> None:
        """Raise SlimxError unless the checkpoint fits the model of the `ModelSpec`."""
        ...

    def load(self, directory: Path, spec: Any, chunks: list[Any]) -> None:
        """Fill the model chunks of a trainer rank; collective."""
        ...


def format_of(directory: Path) -> CheckpointFormat | None:
    """Return the form of a directory with weights; None for Hugging Face's."""
    formats = (kind() for kind in entry_points.load_all("slimx.checkpoint_formats").values())
    return next((each for each in formats if each.recognises(directory)), None)
