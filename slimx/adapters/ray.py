"""Starts Ray on one host with only the programs that a run uses: the GCS, the raylet and the raylet's agents. Also
makes workers use the driver's module search path, and keeps Ray's messages about workers out of the driver's output.

Written for ray 2.60, whose `ray.init` starts three more programs that no option disables. Together they cost 3 s of CPU
time, and `ray.init` waits for one of them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from ray._private import worker
from ray._private.node import Node
from ray.job_config import JobConfig

UNUSED = {
    "start_monitor": "the autoscaler, which a cluster of one host does not need",
    "start_api_server": "the dashboard's program, which ray.init starts and waits for even without a dashboard",
    "start_log_monitor": "the log monitor, which sends workers' output to the driver; each part of a run writes a log",
}
"""Programs of Ray that a run does not need: name of the method of Ray's `Node` that starts the program -> description
of the program, with the reason."""

_PRINTS = "_worker_logs_enabled"


@contextlib.contextmanager
def without_unused() -> Iterator[None]:
    """Prevents `ray.init` inside the block from starting the programs in `UNUSED`. Raises AttributeError if Ray's
    `Node` lacks one of the methods that start them."""
    starts = {name: getattr(Node, name) for name in UNUSED}
    for name in starts:
        setattr(Node, name, _start_nothing)
    try:
        yield
    finally:
        for name, start in starts.items():
            setattr(Node, name, start)


def be_silent() -> None:
    """Stops Ray from printing its messages about workers in this process. The messages are always colored, and the run
    itself reports when one of its processes exits. `ray.init` has no option for this. Raises AttributeError if Ray
    lacks the attribute that controls it."""
    getattr(worker, _PRINTS)
    setattr(worker, _PRINTS, False)


def _start_nothing(node: Node, **_: object) -> None:
    """Replaces each `Node` method in `UNUSED`; does nothing."""


class SearchPath(JobConfig):
    """Configuration of a Ray job whose workers search for modules in the order of this process's `sys.path`; Ray would
    put the working directory first."""

    def __init__(self) -> None:
        # Reversed, because each worker inserts the paths one by one at the front of its sys.path.
        super().__init__(_py_driver_sys_path=[path for path in reversed(sys.path) if path])

    def _runtime_env_has_working_dir(self) -> bool:
        # Called only by `ray.init`, which would otherwise add the directories of the script and the process.
        return True
