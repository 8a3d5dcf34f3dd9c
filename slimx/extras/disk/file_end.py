"""Receiver of changes on a machine of an engine (`publish.delta` with `disk`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

from slimx.reshard.packed import PackedBucket


class FilesEnd:
    """Assembles whole buckets from files; see `slimx.engines.transport.End`."""

    def __init__(self, item: int) -> None:
        """Creates the receiver. `item`: bytes of an element."""
        self.item = item
        self._reader: Any = None

    async def prepare(self, host: str, nodes: Any = None) -> None:
        """Imports torch, which nothing else needs in this process."""
        module = await asyncio.to_thread(import_module, "slimx.extras.disk.changes")
        self._reader = module.ChainReader(self.item)

    @asynccontextmanager
    async def landed(self, packed: PackedBucket) -> AsyncIterator[PackedBucket]:
        """Yields the whole bucket, assembled from its files, in memory that the server opens."""
        arriving = self._reader.landed(packed)
        landed = await asyncio.to_thread(arriving.__enter__)
        try:
            yield landed
        finally:
            arriving.__exit__(None, None, None)
