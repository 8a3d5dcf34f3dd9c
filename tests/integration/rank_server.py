"""Forks the ranks of one job after the other for `rank_processes.ForkServer`, with torch and the trainer imported.

    python -m tests.integration.rank_server DESCRIPTOR [MACHINE]

MACHINE is a module whose install() comes first, and shows another machine. DESCRIPTOR is one end of a connection. In
comes a command ([module, argument, ...]) with the ranks' logs; out go the ranks' process ids, then (process id, exit
status) of each as it ends. In comes END: ranks that still live are killed; out goes END when all are gone, and the next
command can come. When the connection closes, everything ends.

Ranks share this process's order of sets, which those of a run under Ray do not.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Iterable
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests.forked import execute, run_and_end
from tests.integration import rank_start

END = "end"


def main() -> None:
    for machine in sys.argv[2:]:
        importlib.import_module(machine).install()
    rank_start.prepare()
    importlib.import_module("slimx.trainer.trainer")
    connection = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError):
        while True:
            command, logs = connection.recv()
            run(connection, [fork(command, rank, log) for rank, log in enumerate(logs)])


def run(connection: Connection, pids: list[int]) -> None:
    connection.send(pids)
    alive, asked = {os.pidfd_open(pid): pid for pid in pids}, False
    try:
        while alive or not asked:
            for ready in wait([connection, *alive]):
                if ready is connection:
                    asked = connection.recv() == END
                    kill(alive.values())
                else:
                    pid = alive.pop(ready)
                    os.close(ready)
                    connection.send((pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        connection.send(END)
    finally:
        kill(alive.values())


def kill(pids: Iterable[int]) -> None:
    """Kill processes, none of which has been waited for, so that no id is another process's by now."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def fork(command: list[str], rank: int, log: Path) -> int:
    pid = os.fork()
    return pid if pid else run_and_end(partial(become, command, rank, log))


def become(command: list[str], rank: int, log: Path) -> None:
    """Run the command in this process as `python -m` does."""
    with log.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    execute(["-m", *command, str(rank)])


if __name__ == "__main__":
    main()
