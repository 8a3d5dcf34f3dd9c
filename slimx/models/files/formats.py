"""Formats of initial weights other than Hugging Face directories: entry points of `slimx.checkpoint_formats`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from slimx import entry_points

if TYPE_CHECKING:
    import torch


class CheckpointFormat(Protocol):
    """A format of checkpoint directories that a run may start from."""

    name: str
    """The program that writes them."""

    def recognizes(self, directory: Path) -> bool:
        """Returns True if `directory` has this format."""
        ...

    def check(self, directory: Path, spec: object) -> None:
        """Raises SlimxError unless the checkpoint fits the model. `spec`: its ModelSpec."""
        ...

    def load(self, directory: Path, spec: object, chunks: list[torch.nn.Module]) -> None:
        """Loads the weights into a trainer rank's model chunks; collective."""
        ...


def format_of(directory: Path) -> CheckpointFormat | None:
    """Returns the format of a directory with weights; None for Hugging Face's."""
    for kind in entry_points.load_all("slimx.checkpoint_formats").values():
        checkpoint_format = kind()
        if checkpoint_format.recognizes(directory):
            return checkpoint_format
    return None
