"""How what a command starts is ended: once per directory, in order, whatever happens."""

from __future__ import annotations

import asyncio
import fcntl
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slimx.errors import Interrupted, SlimxError


@contextmanager
def only_process_in(directory: Path) -> Iterator[None]:
    """Refuse a second run in the same directory; the kernel gives the lock back however this process ends."""
    with (directory / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SlimxError(
                f"{directory}: another process is training there; wait for it or choose another run.dir"
            ) from None
        yield


async def interruptible(work: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run `work`; SIGINT and SIGTERM cancel it, and its clean-up is waited for. SIGUSR1 sets the event given to it."""
    leaving = asyncio.Event()
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work(leaving))
    received: list[int] = []

    def stop(signum: int) -> None:
        # A second signal while everything is being stopped changes nothing: the stop has its own deadlines.
        if not received:
            received.append(signum)
            task.cancel()

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, stop, signum)
    loop.add_signal_handler(signal.SIGUSR1, leaving.set)
    try:
        await task
    except asyncio.CancelledError:
        if received:
            raise Interrupted(received[0]) from None
        raise


def stopping(stop: Callable[[], Awaitable[None]], note: Callable[[str], None]) -> Callable[..., Awaitable[None]]:
    """An exit callback for `stop`, whose own failure must not hide the error that ended the run."""

    async def close(kind: type | None, error: BaseException | None, trace: object) -> None:
        try:
            await stop()
        except SlimxError as problem:
            if error is None:
                raise
            note(f"while stopping: {problem}")

    return close


async def together(starting: list) -> None:
    """Wait for all; the first failure ends the wait and cancels the rest."""
    tasks = [asyncio.ensure_future(work) for work in starting]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
