"""The parent process of a driver, which explains exits that the driver cannot explain itself.

Ray's library ends its process at once with status 1 when its raylet dies. The parent reports that, and exits with the
status after which a launcher runs the same command again. If a hook ends the driver with status 0 by os._exit, the
parent exits with status 2.

    launcher --signals--> parent --signals--> driver (everything else)
                          parent <--exit status, and a byte on a pipe when its work is done--
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from slimx.errors import LOST, REFUSED
from slimx.orchestration.lifetime.signals import HEARD
from slimx.runtime.logs import log_end
from slimx.runtime.process import end_with_parent

LOOK_S = 2.0
"""Interval between two searches for the log that Ray's library writes in the driver, in seconds."""
SENT = (0, -1, -6)
"""Values of `si_code` for signals that were sent by a process (SI_USER, SI_QUEUE, SI_TKILL). Only these signals are
forwarded to the driver, because signals from a terminal reach it directly."""
ENDED = (1, -signal.SIGABRT)
"""Exit statuses with which Ray's library ends the driver's process."""
LOG = "/python-core-driver-"
"""Substring by which the log of Ray's library is recognized among the paths of the driver's open files."""
WORDS = re.compile(r"Terminate the process|Exiting because the Raylet|Check failed")
"""Pattern of the messages that the library of Ray 2.60 writes into its log (`LOG`) before it ends the driver's
process."""
AGENT = re.compile(r"agent_name = (\w+)")
"""Pattern of the line in a raylet's log that names the agent whose death ended the raylet."""
RAYLET_LINES = 1000
"""Number of lines at the end of a raylet's log that are searched for the agent's exit; more than one, because workers
may log their exits after that of the agent."""


def supervised() -> Callable[[], object]:
    """Forks the process; the child becomes the driver. In the child, returns a function that the driver must call when
    its work is done, successful or not. Never returns in the parent process, which exits when the driver exits."""
    parent = os.getpid()
    read, write = os.pipe()
    os.set_blocking(read, False)  # a child of the driver may keep the write end open
    signal.pthread_sigmask(signal.SIG_BLOCK, (*HEARD, signal.SIGCHLD))
    driver = os.fork()
    if driver == 0:
        end_with_parent(parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*HEARD, signal.SIGCHLD))
        return partial(os.write, write, b".")
    os.close(write)
    status, log = _wait(driver)
    if status == 0 and not _written(read):
        print(
            "slimx: the driver process exited with status 0 before its work was done; remove the call of os._exit "
            "from the hook or library that makes it",
            file=sys.stderr,
            flush=True,
        )
        status = REFUSED
    sentence = ended_by_ray(log) if status in ENDED and log is not None else None
    if sentence is not None:
        print(f"slimx: {sentence}", file=sys.stderr, flush=True)
        status = LOST
    if status < 0:  # exit by the same signal as the driver
        with contextlib.suppress(OSError):
            signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
        os.kill(parent, -status)
    os._exit(status if status >= 0 else 128 - status)


def _written(pipe: int) -> bool:
    try:
        return os.read(pipe, 1) != b""
    except BlockingIOError:
        return False


def _wait(driver: int) -> tuple[int, Path | None]:
    """Forwards signals to the driver until it exits. Returns the driver's exit status, and the path of the log that
    Ray's library wrote in the driver process, if one was found."""
    log: Path | None = None
    while True:
        if log is None:
            log = _log_of(driver)
            received = signal.sigtimedwait((*HEARD, signal.SIGCHLD), LOOK_S)
        else:
            received = signal.sigwaitinfo((*HEARD, signal.SIGCHLD))
        if received is not None and received.si_signo in HEARD and received.si_code in SENT:
            os.kill(driver, received.si_signo)
        ended, raw = os.waitpid(driver, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(raw), log


def _log_of(driver: int) -> Path | None:
    """Returns the path of the log that Ray's library has open in the driver; None before Ray has started."""
    with contextlib.suppress(OSError):  # files may be closed and the driver may exit during this
        for file in Path(f"/proc/{driver}/fd").iterdir():
            path = os.readlink(file)
            if LOG in path:
                return Path(path)
    return None


def ended_by_ray(log: Path) -> str | None:
    """Returns a message that names Ray's lost process if the end of `log` shows that Ray's library ended the driver's
    process; otherwise None."""
    if not WORDS.search(log_end(log)):
        return None
    agents = AGENT.findall(log_end(log.with_name("raylet.out"), RAYLET_LINES))
    lost = "Ray's raylet died"
    if agents:
        lost = f"Ray's {agents[-1]} died, and Ray's raylet with it"
    return (
        f"{lost}, so Ray's library ended this process; see the logs in {log.parent} for the cause, and run the "
        "same command again to continue from the newest checkpoint"
    )
