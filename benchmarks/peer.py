"""A process of a benchmark, driven through a pipe."""

from __future__ import annotations

import multiprocessing as mp
from multiprocessing.connection import Connection
from typing import Any

from slimx.errors import DeadlineError, SlimxError

DEADLINE_S = 120.0
"""Deadline of one call, in seconds."""


class Peer:
    """Handle of a process that runs an object, for the driver."""

    def __init__(self, kind: type, *arguments: Any):
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["slimx.reshard.publish", "slimx.reshard.pack.packer"])  # and with them torch
        self.name = f"{kind.__name__} {arguments[0]}"
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, kind, arguments), daemon=True)
        self.process.start()
        theirs.close()

    def ready(self) -> None:
        """Waits until the process has built its object."""
        self._answer("start")

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the process's object; returns its result or raises its exception."""
        self._pipe.send((method, arguments))
        return self._answer(method)

    def stop(self) -> None:
        self._pipe.close()  # the process ends by itself
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()

    def _answer(self, what: str) -> Any:
        if not self._pipe.poll(DEADLINE_S):
            raise DeadlineError(what, DEADLINE_S, self.name)
        try:
            result = self._pipe.recv()
        except EOFError:
            raise SlimxError(f"{self.name} ended during {what}; its message stands above") from None
        if isinstance(result, BaseException):
            raise result
        return result


def _serve(pipe: Connection, kind: type, arguments: tuple[Any, ...]) -> None:
    """Runs the process's main loop, until the driver closes the pipe."""
    served = kind(*arguments)
    pipe.send(None)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(getattr(served, method)(*arguments))
        except Exception as error:
            pipe.send(error)
