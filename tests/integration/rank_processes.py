"""Starts the ranks of a test as processes and waits for them."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import psutil

from tests import stacks
from tests.integration.conftest import ROOT
from tests.integration.rank_server import END

DEADLINE_S = 600.0
"""Seconds for all that the ranks of one job do: who is late hangs. The longest job, four ranks of test_optimizer, took
98 on two cores at a load of 23."""
ENDED_S = 60.0
"""Seconds in which killed ranks are gone."""


def run_ranks(module: str, out: Path, world: int, seconds: float = DEADLINE_S, machine: str | None = None) -> None:
    """Run `python -m module OUT/job.json RANK` for every rank, in processes that have imported what trainers import.

    Each rank's words are in OUT/RANK.log. When one fails or all are late, the others are ended, and AssertionError has
    its words or where each of them hangs. `machine`: module that shows the ranks another machine than this one.
    """
    fork_server(machine).run([module, str(out / "job.json")], [out / f"{rank}.log" for rank in range(world)], seconds)


@functools.cache
def fork_server(machine: str | None = None) -> ForkServer:
    """The fork server of this test session, or the one for ranks on another `machine`."""
    return ForkServer(machine)


class ForkServer:
    """A process that has imported torch, megatron-core and the trainer, which takes 5 s of a core, and forks ranks.

    It computes nothing itself, so that no thread is lost by the fork. It ends when this process does.
    """

    def __init__(self, machine: str | None = None) -> None:
        self._connection, theirs = Pipe()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, "-m", "tests.integration.rank_server", str(theirs.fileno())]
        command += [machine] if machine else []
        self.process = subprocess.Popen(command, env=environment, cwd=ROOT, pass_fds=[theirs.fileno()])
        theirs.close()

    def run(self, command: list[str], logs: list[Path], seconds: float) -> None:
        """Fork one rank per log, and wait for all."""
        end = time.monotonic() + seconds
        self._connection.send((command, logs))
        try:
            pids = self._receive(end)
            assert pids is not None, f"{command}: cannot be forked after {seconds} s\n{stacks.told([self.process.pid])}"
            for _ in pids:
                ended = self._receive(end)
                assert ended is not None, f"{command}: not done after {seconds} s\n{stacks.told(pids)}"
                rank, code = pids.index(ended[0]), ended[1]
                words = logs[rank].read_text(errors="replace")[-3000:]
                assert code == 0, f"{command}: rank {rank} ended with {code}\n{words}"
        finally:
            self._connection.send(END)
            while (said := self._receive(time.monotonic() + ENDED_S)) not in (END, None):
                pass
            if said is None:  # it hangs itself: the next job gets another
                self.process.kill()
                fork_server.cache_clear()

    def _receive(self, end: float) -> Any:
        """The server's next message; None if there is none until `end`."""
        return self._connection.recv() if self._connection.poll(max(0.0, end - time.monotonic())) else None

    def children(self) -> list[psutil.Process]:
        """The ranks that live."""
        return psutil.Process(self.process.pid).children()
