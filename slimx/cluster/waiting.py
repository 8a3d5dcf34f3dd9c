"""Waits with deadlines for Ray's actors and library, and errors that describe their failures."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import ray

from slimx.cluster.place import Actor
from slimx.errors import DeadlineError, PartLost, SlimxError, one_line
from slimx.runtime.logs import log_end, quoted
from slimx.runtime.tasks import AnyFuture, cancelled, in_thread

DEATH_S = 5.0
"""Maximum number of seconds until Ray reports the death of an actor. Other actors may notice the death earlier, from a
broken connection."""
KILL_S = 10.0
"""Seconds within which a request to kill actors must return."""
_DEATHS = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError)
"""Ray's errors for an actor whose process has ended. OutOfMemoryError, which is not a subclass of RayActorError, means
that Ray killed the process because the machine ran out of memory."""

_UNKNOWN = "connection error code 2"
"""Text in Ray 2.60's error for a process that ended without telling Ray why."""
_SILENT = ", as after SIGKILL (out of memory? see dmesg)"
"""Text that is appended to the error about a process that ended without telling Ray why and without printing anything;
it suggests SIGKILL as the cause."""


class ActorDied(PartLost):
    """Error for an actor whose process has ended."""


async def gather[T](
    references: Sequence[Awaitable[T]], *, what: str, holders: Sequence[str], deadline_s: float, logs: Sequence[Path]
) -> list[T]:
    """Returns the results of all `references`, in order.

    The first failure is raised at once, because the other ranks may wait for the failed one. If the failure may be a
    consequence of another actor's death, waits up to `DEATH_S` seconds for Ray to report that death, which is then
    raised instead.

    `what`: the operation, for errors. `holders` and `logs`: name and log of the actor behind each reference. Raises
    SlimxError with the name and log of the failed actor, or, after `deadline_s` seconds, DeadlineError with the names
    of the actors that did not respond.
    """
    if not references:  # asyncio.wait raises an error for an empty set
        return []
    tasks = [asyncio.ensure_future(_result(reference)) for reference in references]
    try:
        done, pending = await asyncio.wait(tasks, timeout=deadline_s, return_when=asyncio.FIRST_EXCEPTION)
        if any(map(_unexplained, done)):
            await _until_death(pending)
        failed: list[tuple[bool, BaseException, str, Path]] = []
        for task, holder, log in zip(tasks, holders, logs, strict=True):
            error = task.exception() if task.done() else None
            if error is not None:
                failed.append((_died(task), error, holder, log))
        for _, error, holder, log in sorted(failed, key=lambda failure: not failure[0]):
            raise explain(error, what, holder, log)
        if pending:
            late = [holder for holder, task in zip(holders, tasks, strict=True) if task in pending]
            raise DeadlineError(what, deadline_s, ", ".join(late))
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()


async def has_died(*actors: Actor, within: float = math.inf) -> bool:
    """Returns True if one of `actors`, which must have a method `ping`, has died. Waits up to `DEATH_S` seconds, or
    `within` seconds if that is less, for Ray to report a death."""
    pings = [asyncio.ensure_future(_result(actor.ping.remote())) for actor in actors]
    try:
        done, _ = await asyncio.wait(pings, timeout=min(DEATH_S, within), return_when=asyncio.FIRST_EXCEPTION)
        return any(map(_died, done))
    finally:
        await cancelled(*pings)


async def _until_death(tasks: Iterable[AnyFuture]) -> None:
    """Waits, for at most `DEATH_S` seconds, until one of `tasks` fails because its actor has died, or until all are
    done."""
    pending = set(tasks)
    with suppress(TimeoutError):
        async with asyncio.timeout(DEATH_S):
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
                if any(map(_died, done)):
                    return


def _died(task: AnyFuture) -> bool:
    return isinstance(task.exception(), _DEATHS)


def _unexplained(task: AnyFuture) -> bool:
    """Returns True if `task` failed with an error that is neither the death of its actor nor a SlimxError."""
    error = task.exception()
    return error is not None and not _died(task) and not isinstance(getattr(error, "cause", None), SlimxError)


async def _result[T](reference: Awaitable[T]) -> T:
    return await reference


def explain(error: BaseException, what: str, holder: str, log: Path) -> SlimxError:
    """Returns an error that describes the failure of the operation `what` on the actor `holder`. `error`: exception
    with which Ray reported the failure; if it wraps a SlimxError that the actor raised, this SlimxError is returned
    unchanged. `log`: the actor's log file."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, SlimxError):
        return cause
    if isinstance(error, ray.exceptions.RayActorError):
        end = log_end(log)
        reason = quoted(log, end)
        if not end:  # the process printed nothing, so Ray's message is the only explanation
            if _UNKNOWN in str(error):
                reason += _SILENT
            else:
                reason += f"; Ray reports: {(str(error).strip().splitlines() or ['nothing'])[-1]}"
        out: SlimxError = ActorDied(f"{holder} died during {what}; {reason}", code="actor.died", about=holder)
    else:
        out = SlimxError(
            f"{what} failed on {holder} ({type(cause or error).__name__}: {one_line(cause or error)}); see the "
            f"log {log}",
            code="actor.failed",
            about=holder,
        )
    out.__cause__ = error
    return out


async def ask_ray[T, *Ts](
    what: str, holder: str, deadline_s: float, function: Callable[[*Ts], T], *arguments: *Ts
) -> T:
    """Calls `function`, which belongs to Ray's library, in a thread and returns its result.

    `ray.put` needs the raylet and `ray.kill` the GCS. Both functions block forever if the process that they need is
    stopped, so they must not be called in the event loop. `what`: description of the result, and `holder`: the part of
    Ray that must provide it, for errors. Raises DeadlineError after `deadline_s` seconds, and PartLost if Ray reports
    an error."""
    try:
        async with asyncio.timeout(deadline_s):
            return await in_thread(function, *arguments)
    except TimeoutError:
        raise DeadlineError(what, deadline_s, holder) from None
    except ray.exceptions.RayError as error:
        raise PartLost(
            f"{holder} failed while slimx waited for {what} ({one_line(error)}); for the cause, see "
            "session_latest/logs of Ray's temporary directory",
            code="ray.lost",
            about=holder,
        ) from error


async def kill(actors: Iterable[Actor]) -> None:
    """Kills `actors` and never raises. If the GCS does not respond, the actors run until Ray ends."""
    with suppress(DeadlineError, PartLost):
        await ask_ray("the exit of actors", "Ray's GCS", KILL_S, _kill, list(actors))


def _kill(actors: list[Actor]) -> None:
    for actor in actors:
        ray.kill(actor)
