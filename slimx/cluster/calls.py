"""Calls into Ray's library that may block: in threads, with a deadline.

`ray.put` needs the raylet and `ray.kill` the GCS; both wait for ever for one that is stopped, and in the event loop
everything would wait with them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import ray

from slimx.errors import DeadlineError, PartLost
from slimx.runtime.tasks import in_thread

KILL_S = 10.0
"""Seconds for the order to end an actor."""


async def ask_ray[T](what: str, holder: str, deadline_s: float, function: Callable[..., T], *arguments: Any) -> T:
    """The result of `function`, which calls Ray. `what` is asked of `holder`, a part of Ray: raises DeadlineError if it
    does not answer in time, PartLost if it fails."""
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
