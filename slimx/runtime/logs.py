"""Log files of a run's processes: markers of step and phase, and the last lines for error messages."""

from __future__ import annotations

import os
import re
import signal
from datetime import UTC, datetime
from pathlib import Path

_MARK = "==== "
_STARTED = "started"
_READ = 64 * 2**10
"""Maximum number of bytes that are read from the end of a log."""
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def marked(text: str) -> str:
    """Returns a marker line for a log, with the time in UTC and `text`, which names for example the step to which the
    following lines belong."""
    return f"{_MARK}{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC, {text}"


def begin_log(path: Path) -> None:
    """Appends a marker to the log before a process starts, because the processes of a resumed run append to the same
    log."""
    with path.open("a") as log:
        log.write(f"{_MARK}{_STARTED} {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC\n")


def log_end(path: Path, lines: int = 20, *, since: int = 0) -> str:
    """Returns the last `lines` lines that a process has printed to its log, without markers, blank lines and color
    codes; "" if it printed nothing. `since`: size of the log in bytes when the process started; earlier bytes are
    ignored."""
    if not path.is_file():
        return ""
    with path.open("rb") as log:
        log.seek(max(since, log.seek(0, os.SEEK_END) - _READ))
        written = _ESCAPE.sub("", log.read().decode(errors="replace")).splitlines()
    begins = 0
    for index, line in enumerate(written, 1):
        if line.startswith(_MARK + _STARTED):
            begins = index
    printed = [line for line in written[begins:] if line.strip() and not line.startswith(_MARK)]
    return "\n".join(printed[-lines:])


def quoted(path: Path, end: str) -> str:
    """Returns the last part of a message about a process that has ended: the path of its log, followed by `end` (the
    last lines of the log), each line indented."""
    if not end:
        return f"nothing was printed in {path}"
    return f"its log is {path}" + "".join(f"\n  {line}" for line in end.splitlines())


def how_ended(status: int | None) -> str:
    """Describes how a process ended. `status`: its exit status, which is negative or above 128 if a signal ended it;
    None if it is still running but does not respond."""
    if status is None:
        return "does not respond"
    number = -status if status < 0 else status - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"ended with status {status}"
    if name == "SIGSTOP":  # such a process has not ended by itself (`slimx.runtime.process.guard`)
        return "was stopped by SIGSTOP, so slimx killed it"
    hint = " (out of memory? see dmesg)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
