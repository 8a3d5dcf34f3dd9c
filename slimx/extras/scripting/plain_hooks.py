"""Plain functions as hooks. They run in threads, in which everything that an async hook awaits blocks instead."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from functools import partial, wraps
from typing import Any

from slimx.data.records import Prompt
from slimx.environments.processes import Environments
from slimx.errors import SlimxError
from slimx.rollout.hooks import RewardContext, RolloutContext
from slimx.runtime.tasks import in_thread, without_loop

_END = object()


class PlainReward(partial[object]):
    """A plain reward hook, called like an async one. It may block the event loop, because each worker runs one reward
    at a time. If there are engines, it runs in a further thread, in which their methods wait for the answers."""

    async def __call__(self, ctx: RewardContext, *arguments: object) -> object:
        if ctx.engines:
            return await _in_thread(super().__call__, ctx, arguments, "reward.deadline")
        with without_loop():  # the hook may call asyncio.run
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
    """Calls a hook in a thread, and awaits its result if it is an awaitable, which a decorated async function may
    return. `deadline`: key of the hook's deadline."""
    bridge = _Bridge(deadline)
    try:
        value = await in_thread(hook, Blocking(ctx, bridge), *arguments)
        if inspect.isawaitable(value):
            return await value
        return value
    finally:
        bridge.end()


class Blocking:
    """An object that async hooks await, as a plain hook uses it: its methods wait for their results, `with` takes the
    place of `async with`, and `for` that of `async for`. In an event loop, such as that of asyncio.run in the hook, it
    behaves like the object."""

    def __init__(self, value: Any, bridge: _Bridge):
        object.__setattr__(self, "_value", value)
        object.__setattr__(self, "_bridge", bridge)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._value)

    @property
    def __dataclass_fields__(self) -> Any:  # for dataclasses.replace
        return self._value.__dataclass_fields__

    def __copy__(self) -> Blocking:
        return Blocking(copy.copy(self._value), self._bridge)

    def __repr__(self) -> str:
        return repr(self._value)

    def __eq__(self, other: object) -> Any:
        return self._value == (other._value if type(other) is Blocking else other)

    def __hash__(self) -> int:
        return hash(self._value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of a protocol, such as that of pickle
            raise AttributeError(name)
        return self._bridge.blocking(getattr(self._value, name))

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._value, name, value)

    def __enter__(self) -> Any:
        return self._bridge.blocking(self._bridge.wait(self._value.__aenter__()))

    def __exit__(self, *error: object) -> Any:
        return self._bridge.wait(self._value.__aexit__(*error), ends=True)

    def __iter__(self) -> Iterator[Any]:
        pieces = aiter(self._value)
        while (piece := self._bridge.wait(_next(pieces))) is not _END:
            yield self._bridge.blocking(piece)

    async def __aenter__(self) -> Any:
        return await self._bridge.answer(self._value.__aenter__())

    async def __aexit__(self, *error: object) -> Any:
        return await self._bridge.answer(self._value.__aexit__(*error), ends=True)

    async def __aiter__(self) -> AsyncIterator[Any]:
        pieces = aiter(self._value)
        while (piece := await self._bridge.answer(_next(pieces))) is not _END:
            yield piece


class _Bridge:
    """Way from a plain hook's thread to the event loop of the run, which awaits awaitables until the hook ends."""

    def __init__(self, deadline: str):
        self._loop = asyncio.get_running_loop()
        self._deadline = deadline
        self._ended = False
        self._pending: set[Future[Any]] = set()

    def blocking(self, value: Any) -> Any:
        """Returns `value`, an attribute or a result, as the hook is to use it: an object with async methods as
        `Blocking`, also in a mapping; a method as a function with such results; an awaitable as its result, or in an
        event loop of the hook as a coroutine."""
        running = asyncio._get_running_loop()
        if running is self._loop or isinstance(value, Blocking):
            return value
        if inspect.isawaitable(value):
            return self.blocking(self.wait(value)) if running is None else self.answer(value)
        if inspect.ismethod(value):

            @wraps(value)
            def call(*arguments: Any, **keywords: Any) -> Any:
                return self.blocking(value(*arguments, **keywords))

            return call
        if isinstance(value, Mapping) and any(map(_waits, value.values())):
            return {key: self.blocking(part) for key, part in value.items()}
        if _waits(value):
            return Blocking(value, self)
        return value

    async def answer(self, awaitable: Awaitable[Any], *, ends: bool = False) -> Any:
        """Returns the result of `awaitable` in any event loop. `ends`: as for `wait`."""
        if asyncio._get_running_loop() is self._loop:
            return await awaitable
        return self.blocking(await asyncio.wrap_future(self._start(awaitable, ends=ends)))

    def wait(self, awaitable: Awaitable[Any], *, ends: bool = False) -> Any:
        """Returns the result of `awaitable`. `ends`: True if it releases something, which is also possible after the
        end of the hook. Raises SlimxError for another one after the end, such as at the hook's deadline, and in the
        event loop of the run, which would wait for itself."""
        if asyncio._get_running_loop() is self._loop:
            _close(awaitable)
            raise SlimxError(
                "the coroutine that a plain hook returned uses `with` or `for` on a part of its context, which would "
                "block the run; use `async with` and `async for` in coroutines",
                code="hooks.blocking",
                about="with",
            )
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
        if self._ended and not ends:
            _close(awaitable)
            refused: Future[Any] = Future()
            refused.cancel()
            return refused
        future = asyncio.run_coroutine_threadsafe(_awaited(awaitable), self._loop)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        if self._ended and not ends:  # since the test above
            future.cancel()
        return future

    def end(self) -> None:
        """Cancels what the hook still waits for, and refuses what it waits for later."""
        self._ended = True
        for future in [*self._pending]:
            future.cancel()


def _close(awaitable: Awaitable[Any]) -> None:
    """Ends a coroutine that will not be awaited."""
    if inspect.iscoroutine(awaitable):
        awaitable.close()


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


async def _next(pieces: Any) -> Any:
    return await anext(pieces, _END)


def _waits(value: object) -> bool:
    """Returns True if `value` has async methods, or makes objects that have them."""
    if isinstance(value, Environments) or hasattr(type(value), "__anext__"):
        return True
    return any(inspect.iscoroutinefunction(part) for base in type(value).__mro__ for part in vars(base).values())
