"""Interface of checkpoint formats, other than Hugging Face directories, from which a run can load its initial weights.
Formats are entry points of the group `slimx.checkpoint_formats`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from slimx import entry_points

if TYPE_CHECKING:
    import torch


class CheckpointFormat(Protocol):
    """A format of checkpoint directories from which a run can load its initial weights."""

    name: str
    """Name of the program that writes checkpoints in this format, for error messages."""

    def recognizes(self, directory: Path) -> bool:
        """Returns True if `directory` contains a checkpoint in this format."""

    def check(self, directory: Path, spec: object) -> None:
        """Raises SlimxError unless the checkpoint in `directory` contains the weights of the model `spec`, a
        ModelSpec."""

    def load(self, directory: Path, spec: object, chunks: list[torch.nn.Module]) -> None:
        """Loads the weights in `directory` into a trainer rank's model chunks. Collective over all trainer ranks.
        `spec`: the model, a ModelSpec."""


def format_of(directory: Path) -> CheckpointFormat | None:
    """Returns the format of the checkpoint in `directory`; None if no entry point recognizes it, as for a Hugging Face
    directory."""
    for kind in entry_points.load_all("slimx.checkpoint_formats").values():
        checkpoint_format = kind()
        if checkpoint_format.recognizes(directory):
            return checkpoint_format
    return None
