"""Waiting for Ray's actors and its library with a deadline, and their failures in words."""

from __future__ import annotations

import asyncio
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from slimx.errors import DeadlineError, PartLost, SlimxError
from slimx.runtime.logs import log_end, quoted
from slimx.runtime.tasks import cancelled, in_thread

DEATH_S = 5.0
"""Seconds in which Ray knows that an actor has died: others may hear of it earlier, by a connection that broke."""
KILL_S = 10.0
"""Seconds for the order to end an actor."""
_DEATHS = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError)
"""Answers of Ray for an actor whose process has ended; the second one is no kind of the first, and says that Ray itself
killed it because the machine ran out of memory."""

_UNKNOWN, _SILENT = "connection error code 2", ", as after SIGKILL (out of memory? see dmesg)"
"""Words of ray 2.60 for a process that ended without a word to it, and what they mean if nothing was printed either."""


class ActorDied(PartLost):
    """The process behind an actor has ended."""


async def gather(
    references: Sequence[ray.ObjectRef], *, what: str, holders: Sequence[str], deadline_s: float, logs: Sequence[Path]
) -> list[Any]:
    """Results of all `references`. The first failure is raised at once: the other ranks would wait for the failed one.
    Only an error that may come from the death of another actor waits until Ray knows of that, up to `DEATH_S`.

    Raises SlimxError with the failed holder's name and log, DeadlineError naming the holders that did not answer.
    """
    if not references:  # no engine of the run's own, say; asyncio.wait refuses to wait for nothing
        return []
    tasks = [asyncio.ensure_future(_result(reference)) for reference in references]
    try:
        done, pending = await asyncio.wait(tasks, timeout=deadline_s, return_when=asyncio.FIRST_EXCEPTION)
        if any(map(_unexplained, done)):
            await _until_death(pending)
        failed = [one for one in zip(tasks, holders, logs, strict=True) if one[0].done() and one[0].exception()]
        for task, holder, log in sorted(failed, key=lambda one: not _died(one[0])):
            raise explain(task.exception(), what, holder, log)
        if pending:
            late = [holder for holder, task in zip(holders, tasks, strict=True) if task in pending]
            raise DeadlineError(what, deadline_s, ", ".join(late))
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()


async def has_died(*actors: Any, within: float = math.inf) -> bool:
    """True if one of `actors`, which answer `ping`, has died; Ray gets `DEATH_S` seconds to know it, at most
    `within`."""
    pings = [asyncio.ensure_future(_result(actor.ping.remote())) for actor in actors]
    try:
        done, _ = await asyncio.wait(pings, timeout=min(DEATH_S, within), return_when=asyncio.FIRST_EXCEPTION)
        return any(map(_died, done))
    finally:
        await cancelled(*pings)


async def _until_death(tasks: set[asyncio.Future[Any]]) -> None:
    """Wait until one of `tasks` fails because its actor has died, or all are done; at most `DEATH_S` seconds."""
    with suppress(TimeoutError):
        async with asyncio.timeout(DEATH_S):
            while tasks:
                done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
                if any(map(_died, done)):
                    return


def _died(task: asyncio.Future[Any]) -> bool:
    return isinstance(task.exception(), _DEATHS)


def _unexplained(task: asyncio.Future[Any]) -> bool:
    """True for a failure that is neither a death nor a sentence of slimx's."""
    error = task.exception()
    return error is not None and not _died(task) and not isinstance(getattr(error, "cause", None), SlimxError)


async def _result(reference: ray.ObjectRef) -> Any:
    return await reference


def explain(error: BaseException, what: str, holder: str, log: Path) -> SlimxError:
    """A Ray failure as one sentence; a SlimxError raised inside an actor as it was."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, SlimxError):
        return cause
    if isinstance(error, ray.exceptions.RayActorError):
        said = quoted(log, end := log_end(log))
        if not end:  # the process died before it printed anything: Ray alone knows of what
            said += _SILENT if _UNKNOWN in str(error) else f"; Ray says: {_last_line(error)}"
        out: SlimxError = ActorDied(f"{holder} died during {what}; {said}", code="actor.died", about=holder)
    else:
        out = SlimxError(
            f"{what} failed on {holder}: {type(cause or error).__name__}: {_short(cause or error)}; its log is {log}",
            code="actor.failed",
            about=holder,
        )
    out.__cause__ = error
    return out


def _short(error: BaseException) -> str:
    """The words of an error on one line; of the pages that Ray writes about memory the begin, with its figures."""
    return textwrap.shorten(str(error), 400, placeholder=" ...")


def first_line(error: BaseException) -> str:
    """An error without the log that it may quote."""
    return str(error).partition("\n")[0]


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["nothing"])[-1]


async def ask_ray[T](what: str, holder: str, deadline_s: float, function: Callable[..., T], *arguments: Any) -> T:
    """The result of `function`, which calls Ray, in a thread: `ray.put` needs the raylet and `ray.kill` the GCS; both
    wait for ever for one that is stopped, and in the event loop everything would wait with them.

    `what` is asked of `holder`, a part of Ray: raises DeadlineError if it does not answer in time, PartLost if it
    fails."""
    try:
        async with asyncio.timeout(deadline_s):
            return await in_thread(function, *arguments)
    except TimeoutError:
        raise DeadlineError(what, deadline_s, holder) from None
    except ray.exceptions.RayError as error:
        why = " ".join(str(error).split())[:300]
        raise PartLost(f"{holder} failed at {what}: {why}", code="ray.lost", about=holder) from error


async def kill(actors: Iterable[Any]) -> None:
    """End actors at once; does not raise. Without the GCS they end with Ray."""
    with suppress(DeadlineError, PartLost):
        await ask_ray("the end of actors", "Ray's GCS", KILL_S, _kill, list(actors))


def _kill(actors: list[Any]) -> None:
    for actor in actors:
        ray.kill(actor)
