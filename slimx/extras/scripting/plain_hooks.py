"""Plain functions as hooks. They run in threads, in which everything that an async hook awaits blocks instead."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from functools import partial, wraps
from typing import Any

from slimx.data.records import Prompt
from slimx.environments.processes import Environments
from slimx.errors import SlimxError
from slimx.rollout.hooks import RewardContext, RolloutContext
from slimx.runtime.tasks import in_thread

_END = object()


class PlainReward(partial[object]):
    """A plain reward hook, called like an async one. It may block the event loop, because each worker runs one reward
    at a time. If there are engines, it runs in a further thread, in which their methods wait for the answers."""

    async def __call__(self, ctx: RewardContext, *arguments: object) -> object:
        if ctx.engines:
            return await _in_thread(super().__call__, ctx, arguments, "reward.deadline")
        value = super().__call__(ctx, *arguments)
        if inspect.isawaitable(value):
            return await value
        return value


class PlainGenerate(partial[object]):
    """A plain generate hook, called like an async one. It runs in a thread, because the event loop serves all
    rollouts."""

    async def __call__(self, ctx: RolloutContext, prompt: Prompt) -> object:
        return await _in_thread(super().__call__, ctx, (prompt,), "rollout.rollout_deadline")


async def _in_thread(hook: Callable[..., object], ctx: object, arguments: tuple[object, ...], deadline: str) -> object:
    """Calls a hook in a thread, and awaits its result if it is an awaitable, because the hook is an async function in
    another's disguise. `deadline`: key of the hook's deadline."""
    loop = _Loop(deadline)
    try:
        value = await in_thread(hook, Blocking(ctx, loop), *arguments)
        if inspect.isawaitable(value):
            return await value
        return value
    finally:
        loop.end()


class Blocking:
    """An object that async hooks await, as a plain hook uses it: its methods wait for their results, `with` takes the
    place of `async with`, and `for` that of `async for`. In the run's event loop, it behaves like the object."""

    def __init__(self, value: Any, loop: _Loop):
        self._value = value
        self._loop = loop

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._value)

    @property
    def __dataclass_fields__(self) -> Any:  # for dataclasses.replace
        return self._value.__dataclass_fields__

    def __repr__(self) -> str:
        return repr(self._value)

    def __getattr__(self, name: str) -> Any:
        return self._loop.shown(getattr(self._value, name))

    def __enter__(self) -> Any:
        return self._loop.shown(self._value.__aenter__())

    def __exit__(self, *error: object) -> Any:
        return self._loop.wait(self._value.__aexit__(*error), ends=True)

    def __iter__(self) -> Iterator[Any]:
        pieces = aiter(self._value)
        while (piece := self._loop.wait(_next(pieces))) is not _END:
            yield self._loop.shown(piece)


class _Loop:
    """The event loop of a run, in which a plain hook's thread has awaitables awaited until the hook ends."""

    def __init__(self, deadline: str):
        self._loop = asyncio.get_running_loop()
        self._deadline = deadline
        self._ended = False
        self._pending: set[Future[Any]] = set()

    def shown(self, value: Any) -> Any:
        """Returns `value`, an attribute or a result, as the hook is to use it: an object with async methods as
        `Blocking`, also in a mapping; a method as a function whose results are shown; an awaitable as its result."""
        running = asyncio._get_running_loop()
        if running is self._loop:
            return value
        if inspect.isawaitable(value):
            if running is not None:  # of asyncio.run in the hook
                return asyncio.wrap_future(self._start(value))
            return self.shown(self.wait(value))
        if inspect.ismethod(value):

            @wraps(value)
            def call(*arguments: Any, **keywords: Any) -> Any:
                return self.shown(value(*arguments, **keywords))

            return call
        if isinstance(value, Mapping) and any(map(_waits, value.values())):
            return {key: self.shown(part) for key, part in value.items()}
        if _waits(value):
            return Blocking(value, self)
        return value

    def wait(self, awaitable: Awaitable[Any], *, ends: bool = False) -> Any:
        """Returns the result of `awaitable`. `ends`: True if it releases something, which is also possible after the
        end of the hook. Raises SlimxError for another one after the end, such as at the hook's deadline."""
        future = self._start(awaitable, ends=ends)
        try:
            return future.result()
        except CancelledError as error:
            if not self._ended:
                raise
            raise SlimxError(
                f"a plain hook waited for its context after the deadline that {self._deadline} sets, or after it had "
                f"returned; raise {self._deadline}, or end the hook's threads before it returns",
                code="hooks.ended",
                about=self._deadline,
            ) from error

    def _start(self, awaitable: Awaitable[Any], *, ends: bool = False) -> Future[Any]:
        future = asyncio.run_coroutine_threadsafe(_awaited(awaitable), self._loop)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        if self._ended and not ends:
            future.cancel()
        return future

    def end(self) -> None:
        """Cancels what the hook still waits for, and refuses what it waits for later."""
        self._ended = True
        for future in [*self._pending]:
            future.cancel()


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


async def _next(pieces: Any) -> Any:
    return await anext(pieces, _END)


def _waits(value: object) -> bool:
    """Returns True if `value` has async methods, or makes objects that have them."""
    if isinstance(value, Environments) or hasattr(type(value), "__anext__"):
        return True
    return any(inspect.iscoroutinefunction(part) for base in type(value).__mro__ for part in vars(base).values())
