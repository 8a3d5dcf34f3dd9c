"""`slimx stacks`: where the processes of a run are in their Python code, on the machine where it is asked."""

from __future__ import annotations

import socket
from pathlib import Path

from slimx.errors import SlimxError
from slimx.observability.live.stacks import stacks, told
from slimx.observability.tracking.run_files import check_run


def run_stacks(directory: Path) -> str:
    """The stacks as text. Raises SlimxError for a directory without a run, or where none of its processes runs here."""
    check_run(directory)
    found = stacks(directory)
    if not found:
        raise SlimxError(
            f"no process of {directory} runs on {socket.gethostname()}, or none that this user may see; ask on the "
            "machines of the run, as its user or as root",
            code="stacks.none",
            about=str(directory),
        )
    return told(found)
