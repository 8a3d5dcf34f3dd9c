"""The parent process of a driver. Ray's library ends its process at once with status 1 when it loses its raylet: the
parent reports that, and exits with the status for which the same command is started again. If a hook ends the driver
with status 0 by os._exit, the parent exits with 2.

    launcher --signals--> parent --signals--> driver (everything else)
                          parent <--status, a byte at the end of its work--
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
"""Seconds between two searches for the log of Ray's library."""
SENT = (0, -1, -6)
"""Codes of signals sent by a process (SI_USER, SI_QUEUE, SI_TKILL). Signals of a terminal reach the driver directly."""
ENDED = (1, -signal.SIGABRT)
"""Exit statuses with which Ray's library ends a process."""
LOG = "/python-core-driver-"
"""Part of the log's path of Ray's library in a driver."""
WORDS = re.compile(r"Terminate the process|Exiting because the Raylet|Check failed")
"""Last messages of ray 2.60's library in that log."""
AGENT = re.compile(r"agent_name = (\w+)")
"""Name of the agent in a raylet's log whose death ended the raylet."""
RAYLET_LINES = 1000
"""Lines of a raylet's log that are searched for it, at most: its workers may end after the agent."""


def supervised() -> Callable[[], object]:
    """Forks: continues in the child, the driver, and returns the function that it calls when its work is done, whatever
    its status. The parent exits when the driver does and never returns."""
    parent = os.getpid()
    read, write = os.pipe()
    os.set_blocking(read, False)  # a child of the driver may keep the other end open
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
            "slimx: the driver was ended with status 0 before its work was over; take os._exit out of the hook or "
            "library that calls it",
            file=sys.stderr,
            flush=True,
        )
        status = REFUSED
    sentence = ended_by_ray(log) if status in ENDED and log is not None else None
    if sentence is not None:
        print(f"slimx: {sentence}", file=sys.stderr, flush=True)
        status = LOST
    if status < 0:  # end in the same way as the driver
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
    """Forwards signals until the driver ends. Returns its status, and the log of Ray's library in it."""
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
    """Returns the log that Ray's library has opened in the driver; None before Ray has started."""
    with contextlib.suppress(OSError):  # files are closed, and the driver may have ended
        for file in Path(f"/proc/{driver}/fd").iterdir():
            path = os.readlink(file)
            if LOG in path:
                return Path(path)
    return None


def ended_by_ray(log: Path) -> str | None:
    """Returns a sentence naming the lost part if the last lines of `log` say that Ray's library ended its process."""
    if not WORDS.search(log_end(log)):
        return None
    agents = AGENT.findall(log_end(log.with_name("raylet.out"), RAYLET_LINES))
    lost = "Ray's raylet is lost"
    if agents:
        lost = f"Ray's {agents[-1]} is lost, and Ray's raylet with it"
    return (
        f"{lost}, so Ray's library has ended this process; the logs in {log.parent} say why, and the same "
        "command goes on from the newest checkpoint"
    )
