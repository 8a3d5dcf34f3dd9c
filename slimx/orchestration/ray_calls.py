"""Calls into Ray's library that may block: in threads, with a deadline.

`ray.put` needs the raylet and `ray.kill` the GCS; both wait for ever for one that is stopped, and in the event loop
everything would wait with them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

import ray

from slimx.errors import DeadlineError
from slimx.threads import in_thread

T = TypeVar("T")
KILL_S = 10.0
"""Seconds for the order to end an actor."""


async def ask_ray(what: str, holder: str, deadline_s: float, function: Callable[..., T], *arguments: Any) -> T:
    """What `function` returns, which calls Ray. Raises DeadlineError: `holder`, a part of Ray, holds `what`."""
    try:
        async with asyncio.timeout(deadline_s):
            return await in_thread(function, *arguments)
    except TimeoutError:
        raise DeadlineError(what, deadline_s, holder) from None


async def kill(actors: Iterable[Any]) -> None:
    """End actors at once; does not raise. Without the GCS they end with Ray."""
    with suppress(DeadlineError, ray.exceptions.RayError):
        await ask_ray("the end of actors", "Ray's GCS", KILL_S, _kill, list(actors))


def _kill(actors: list[Any]) -> None:
    for actor in actors:
        ray.kill(actor)
