"""Starts a Ray of one machine with what a run uses of it, the GCS, the raylet and the raylet's agents; and has workers
search modules as the driver does; and keeps Ray's words about the driver's workers out of the driver's output.

Written for ray 2.60, whose `ray.init` starts three more programs that no option leaves out: 3 s of a core together, and
it waits for one of them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from ray._private import worker
from ray._private.node import Node
from ray.job_config import JobConfig

UNUSED = {
    "start_monitor": "the autoscaler: a cluster of one machine stays as it is",
    "start_api_server": "the dashboard's program, started and waited for without a dashboard too",
    "start_log_monitor": "brings the output of workers to the driver: each part of a run writes a log of its own",
}
"""Methods of Ray's `Node` that start a program each, and why a run does without it."""

_PRINTS = "_worker_logs_enabled"


@contextlib.contextmanager
def without_unused() -> Iterator[None]:
    """Have a Ray that is started inside the block start nothing of `UNUSED`. Raises AttributeError if Ray has not got
    one of them any more."""
    starts = {name: getattr(Node, name) for name in UNUSED}
    for name in starts:
        setattr(Node, name, _start_nothing)
    try:
        yield
    finally:
        for name, start in starts.items():
            setattr(Node, name, start)


def be_silent() -> None:
    """Keep Ray from printing in this process, coloured wherever it goes, what it hears of workers: the run reports the
    end of each part in its own words. No option of `ray.init` does that. Raises AttributeError if it cannot be."""
    getattr(worker, _PRINTS)
    setattr(worker, _PRINTS, False)


def _start_nothing(node: Node, **_: Any) -> None:
    """In place of a method that starts a program."""


class SearchPath(JobConfig):
    """A job whose workers search modules in the order of this process. Ray would put the working directory first."""

    def __init__(self) -> None:
        # Each worker puts one after the other before all that it has.
        super().__init__(_py_driver_sys_path=[path for path in reversed(sys.path) if path])

    def _runtime_env_has_working_dir(self) -> bool:
        return True  # asked by `ray.init` alone, which else adds the directories of the script and of the process
