"""Starts Ray on one host with only the programs that a run uses: the GCS, the raylet and the raylet's agents; makes
workers search modules as the driver does; and keeps Ray's messages about workers out of the driver's output.

Written for ray 2.60, whose `ray.init` starts three more programs that no option disables: 3 s of a core in total, and
it waits for one of them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from ray._private import worker
from ray._private.node import Node
from ray.job_config import JobConfig

UNUSED = {
    "start_monitor": "the autoscaler: a cluster of one host does not change",
    "start_api_server": "the dashboard's program, started and waited for even without a dashboard",
    "start_log_monitor": "sends the output of workers to the driver: each part of a run writes its log itself",
}
"""Methods of Ray's `Node` that start one program each, and why a run does not need it."""

_PRINTS = "_worker_logs_enabled"


@contextlib.contextmanager
def without_unused() -> Iterator[None]:
    """Makes a Ray that is started inside the block skip the programs in `UNUSED`. Raises AttributeError if Ray no
    longer has one of them."""
    starts = {name: getattr(Node, name) for name in UNUSED}
    for name in starts:
        setattr(Node, name, _start_nothing)
    try:
        yield
    finally:
        for name, start in starts.items():
            setattr(Node, name, start)


def be_silent() -> None:
    """Stops Ray from printing messages about workers in this process (always coloured): the run itself reports the end
    of each part. `ray.init` has no option for it. Raises AttributeError if it is impossible."""
    getattr(worker, _PRINTS)
    setattr(worker, _PRINTS, False)


def _start_nothing(node: Node, **_: object) -> None:
    """Replaces a method that starts a program."""


class SearchPath(JobConfig):
    """A job whose workers search modules in the order of this process; Ray would put the working directory first."""

    def __init__(self) -> None:
        # Each worker inserts them one by one before its existing entries.
        super().__init__(_py_driver_sys_path=[path for path in reversed(sys.path) if path])

    def _runtime_env_has_working_dir(self) -> bool:
        return True  # called by `ray.init` only, which would otherwise add the script's and the process's directories
