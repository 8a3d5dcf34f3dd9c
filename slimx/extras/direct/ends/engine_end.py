"""Engine's end of direct transfers: memory on each of its machines, into which trainer ranks write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import import_module
from itertools import chain
from typing import Any

from slimx.reshard.packed import PackedBucket


class DirectEnd:
    """Receivers of an engine on one machine, in host memory or in the memory of its GPUs. The `DirectEnd` on the
    engine's first machine also calls those on the other machines."""

    def __init__(self) -> None:
        self._receivers: list[Any] = []
        self._nodes: Any = None
        self._landings = AsyncExitStack()

    async def prepare(self, host: str, nodes: Any = None) -> None:
        """Prepares for the start of the server by importing torch and NIXL, which only this transport needs in the
        process. `host`, `nodes`: as in `slimx.engines.transport.End.prepare`."""
        self.host = host
        self._nodes = nodes
        await asyncio.to_thread(import_module, "slimx.extras.direct.ends.receiver")

    async def join(self, invitations: Sequence[Any]) -> list[Any]:
        """Creates one receiver for each of `invitations`, spreading the receivers evenly over the machines, and returns
        the offers of memory that the receivers make to trainer ranks. Receivers from earlier calls are closed."""
        first, *rest = _shares(invitations, self._machines)
        offered, others = await asyncio.gather(self._join(first), self._others("join", rest))
        return [*offered, *chain.from_iterable(others)]

    async def bases(self) -> list[list[int]]:
        """Returns, for each receiver and bucket, the index of the transfer whose bytes the receiver still stores as a
        base for changes (`publish.delta`); 0 if it stores none."""
        others = await self._others("bases")
        return [*(receiver.bases() for receiver in self._receivers), *chain.from_iterable(others)]

    @asynccontextmanager
    async def landed(self, packed: PackedBucket) -> AsyncIterator[PackedBucket]:
        """Waits until a bucket has arrived, and yields it in memory that the server can open until the block ends. Each
        of the engine's machines receives only the part for its ranks."""
        if self._nodes is None:
            async with self._landed(packed) as landed:
                yield landed
            return
        from slimx.extras.direct.ends.sent_bucket import shares_of, together

        first, *rest = shares_of(packed, self._machines)
        landing = asyncio.ensure_future(self._others("land", rest))
        try:
            async with self._landed(first) as landed:
                yield together(packed, [landed, *await landing])
        finally:
            landing.cancel()
            await self._others("let_go")

    async def land(self, packed: PackedBucket) -> PackedBucket:
        """Waits until this machine's part of a bucket has arrived, and returns it in memory that the server can open
        until `let_go`."""
        return await self._landings.enter_async_context(self.landed(packed))

    async def let_go(self) -> None:
        await self._landings.aclose()

    @property
    def _machines(self) -> int:
        return 1 if self._nodes is None else 1 + self._nodes.count

    async def _others(self, method: str, messages: Sequence[Any] | None = None) -> list[Any]:
        """Calls `method` on the engine's other machines, each with its item of `messages`, and returns the results."""
        return [] if self._nodes is None else await self._nodes.transport(method, messages)

    async def _join(self, invitations: Sequence[Any]) -> list[Any]:
        from slimx.extras.direct.ends.receiver import DirectReceiver

        while self._receivers:
            await asyncio.to_thread(self._receivers.pop().close)
        for invitation in invitations:
            self._receivers.append(await asyncio.to_thread(DirectReceiver, invitation, self.host))
        return [receiver.offer() for receiver in self._receivers]

    @asynccontextmanager
    async def _landed(self, packed: PackedBucket) -> AsyncIterator[PackedBucket]:
        """Yields this machine's part of a bucket. If the wait for it is cancelled, closes the receivers and waits for
        their threads."""
        from slimx.extras.direct.ends.sent_bucket import shares_of, together

        shares = zip(self._receivers, shares_of(packed, len(self._receivers)), strict=True)
        arriving = []
        entering = []
        for receiver, part in shares:
            context = receiver.landed(part)
            arriving.append(context)
            entering.append(asyncio.ensure_future(asyncio.to_thread(context.__enter__)))
        try:
            await asyncio.wait(entering)
            yield together(packed, [entered.result() for entered in entering])
        finally:
            if not all(entered.done() for entered in entering):
                for receiver in self._receivers:
                    await asyncio.to_thread(receiver.close)
                await asyncio.wait(entering)
            for context, entered in zip(arriving, entering, strict=True):
                if entered.exception() is None:
                    context.__exit__(None, None, None)


def _shares(values: Sequence[Any], count: int) -> list[Sequence[Any]]:
    length = len(values) // count
    return [values[index * length : (index + 1) * length] for index in range(count)]
