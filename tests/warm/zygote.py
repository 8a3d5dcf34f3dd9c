"""Forks programs: `python -m tests.warm.zygote DIRECTORY EXECUTABLE OWNER`, until process OWNER ends.

Each role has a zygote, which is started by the first request for it. It has one thread and computes nothing, so that a
fork loses nothing.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import selectors
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
from setproctitle import setproctitle
from sitecustomize import answer

from slimx.orchestration.lifetime.garbage import MIDDLE, OLD, YOUNG
from slimx.runtime.process import adopt_orphans, end_with_parent
from tests.warm import guards
from tests.warm.client import BYTES, RAY_WORKER, without_flags
from tests.warm.interpreter import MARK, TEST
from tests.warm.program import execute, run_and_end

FILES = 200
"""Files that a program inherits, at most."""


def load_driver() -> None:
    """Imports what `slimx train`, Ray's agents and the programs that make the quickstart's model need."""
    # Ray reads it when it is imported.
    os.environ["RAY_AUTH_MODE"] = "token"
    import ray  # noqa: F401
    import torch  # noqa: F401
    import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

    import slimx.commands.start
    import slimx.orchestration.run  # noqa: F401


def load_rank() -> None:
    """Imports what trainers need, without Ray, whose library reads a worker's variables when it is imported."""
    from slimx.trainer import process

    names = process.install_adapters()
    process.install_adapters = lambda **options: names  # they are installed once in a process
    import slimx.trainer.trainer
    import slimx.trainer.worker  # noqa: F401


def load_rank_with_engine() -> None:
    """Imports what trainers need besides Transformer Engine's layers."""
    from tests.integration import transformer_engine_stand

    transformer_engine_stand.install()
    load_rank()


def load_rank_on_pretended_gpu() -> None:
    """Imports what trainers need on a pretended GPU, without the layers that they choose."""
    from tests.integration import pretended_cuda

    pretended_cuda.install()
    pretended_cuda.install = lambda: None  # once in a process
    import slimx.adapters.megatron.layers
    import slimx.trainer.trainer  # noqa: F401


def load_server() -> None:
    """Imports SGLang as a server on the CPU does."""
    from slimx.engines.server import launch

    launch.prepare(["--device", "cpu"])
    launch.prepare_imports()
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler  # noqa: F401


ROLES: dict[str, Callable[[], None]] = {
    "driver": load_driver,
    "rank": load_rank,
    "rank_with_engine": load_rank_with_engine,
    "rank_on_pretended_gpu": load_rank_on_pretended_gpu,
    "server": load_server,
}


def main(directory: Path, owner: int) -> None:
    """Starts the zygote of each role when it is requested first."""
    selector, myself = selectors.DefaultSelector(), os.getpid()
    with contextlib.suppress(ProcessLookupError):
        selector.register(os.pidfd_open(owner), selectors.EVENT_READ)
        for role in ROLES:
            selector.register(listening(directory / role), selectors.EVENT_READ, role)
        (directory / "ready").touch()
        while (role := (key := selector.select()[0][0]).data) is not None:
            selector.unregister(key.fileobj)
            if os.fork() == 0:
                end_with_parent(myself)
                selector.close()
                become_zygote(role, key.fileobj, directory / "programs")
            key.fileobj.close()  # with the zygote's end requests are refused
    shutil.rmtree(directory, ignore_errors=True)  # zygotes end with this process


def listening(path: Path) -> socket.socket:
    """Returns a socket that listens at `path`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(64)
    return listener


def become_zygote(role: str, listener: socket.socket, programs: Path) -> NoReturn:
    """Imports what programs of a role share, and forks them; `programs`: directory with a file for each."""
    if role != "server":
        guards.install(pytest.MonkeyPatch(), programs.parent)
    gc.disable()  # until all is imported, as in pytest's processes
    ROLES[role]()
    gc.enable()
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{role}: a fork of a process with {threads} threads may hang"
    adopt_orphans()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)  # as in a driver
    Zygote(listener, programs).serve()


class Zygote:
    """Forks a program for each connection."""

    def __init__(self, listener: socket.socket, programs: Path):
        self._listener, self._programs = listener, programs
        self._connections: dict[int, socket.socket] = {}
        """Connections by process id of the program."""
        self._ended, write = os.pipe()
        os.set_blocking(write, False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._ended, selectors.EVENT_READ)

    def serve(self) -> NoReturn:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == self._ended:
                    os.read(self._ended, 4096)
                    self._reap()
                elif self._connections.get(key.data) is key.fileobj:  # else the program has ended a moment ago
                    self._selector.unregister(key.fileobj)
                    os.kill(key.data, signal.SIGKILL)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        message, files, _, _ = socket.recv_fds(connection, BYTES, FILES)
        if not message:  # the requester was killed before it had sent its request
            connection.close()
            return
        request, myself = json.loads(message), os.getpid()
        program = os.fork()
        if program == 0:
            self._leave(connection)
            end_with_parent(myself)
            become(list(files), **{name: value for name, value in request.items() if name != "tied"})
        for file in files:
            os.close(file)
        self._connections[program] = connection
        if request["tied"]:
            self._selector.register(connection, selectors.EVENT_READ, program)
        # A fork does not show its variables.
        kept = {name: value for name, value in request["environment"].items() if name in (MARK, TEST)}
        (self._programs / str(program)).write_text(json.dumps(kept))
        with contextlib.suppress(OSError):  # ended meanwhile
            connection.send(str(program).encode())

    def _leave(self, connection: socket.socket) -> None:
        """Closes in a child what belongs to the zygote."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for other in (self._listener, connection, *self._connections.values()):
            other.close()

    def _reap(self) -> None:
        for process, status in _ended_children():
            if (connection := self._connections.pop(process, None)) is None:  # an orphan
                continue
            (self._programs / str(process)).unlink(missing_ok=True)  # the session ends
            with contextlib.suppress(KeyError):
                self._selector.unregister(connection)
            with contextlib.suppress(OSError):
                connection.send(str(os.waitstatus_to_exitcode(status)).encode())
            connection.close()


def _ended_children() -> Iterator[tuple[int, int]]:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


def become(
    files: list[int], arguments: list[str], environment: dict[str, str], directory: str, numbers: list[int], parent: int
) -> NoReturn:
    """Runs a program in this process."""
    high = 1000  # above all numbers
    for index, file in enumerate(files):
        os.dup2(file, high + index)
        os.close(file)
    os.closerange(3, high)
    for index, number in enumerate(numbers):
        os.dup2(high + index, number)
        os.close(high + index)
    # Python found out of the zygote's files whether they can be sought.
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.setsid()
    os.chdir(directory)
    if not any("/ray/" in word for word in arguments):  # which sets titles by another library
        setproctitle(" ".join([sys.executable, *arguments]))
    take_for_parent(parent)
    if "slimx.runtime.process" in arguments:
        guards.fork_commands(run)
    run(arguments, environment)


def run(arguments: list[str], environment: dict[str, str]) -> NoReturn:
    """Runs `python ARGUMENTS` in this process."""
    os.environ.clear()
    os.environ.update(environment)
    answer()  # in the directory of its session; the file that the fork opened is closed
    sys.path[:0] = [
        path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path
    ]
    words = without_flags(arguments)
    worker = next((index for index, word in enumerate(words) if word.endswith(RAY_WORKER)), 0)
    # Ray starts its worker by a program that sets variables, none here.
    words = [word for word in words[worker:] if not worker or not word.startswith(("--language", "--serialized-"))]

    run_and_end(partial(execute, words))


def take_for_parent(parent: int) -> None:
    """Has os.getppid return `parent` in this process until that has ended, then 1."""
    program, getppid = os.getpid(), os.getppid
    try:
        life = os.pidfd_open(parent)
    except ProcessLookupError:
        life = None

    def present() -> int:
        if os.getpid() != program:
            return getppid()
        return 1 if life is None or select.select([life], [], [], 0)[0] else parent

    os.getppid = present


if __name__ == "__main__":
    # Nothing that a terminal or the end of a worker of the tests sends reaches it.
    os.setsid()
    sys.executable = sys.argv[2]
    main(Path(sys.argv[1]), int(sys.argv[3]))
