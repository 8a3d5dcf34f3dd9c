"""Receiver of changes stored as files, on a machine of an engine (`publish.delta` with `publish.transport: disk`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

from slimx.reshard.packed import PackedBucket


class FilesEnd:
    """Receiver that assembles whole buckets from files (see `slimx.engines.transport.End`)."""

    def __init__(self, item: int) -> None:
        """Creates the receiver. `item`: bytes per element."""
        self.item = item
        self._reader: Any = None

    async def prepare(self, host: str, nodes: Any = None) -> None:
        """Creates the reader, which imports torch; nothing else in this process needs torch."""
        module = await asyncio.to_thread(import_module, "slimx.extras.disk.changes")
        self._reader = module.ChainReader(self.item)

    @asynccontextmanager
    async def landed(self, packed: PackedBucket) -> AsyncIterator[PackedBucket]:
        """Yields the whole bucket, assembled from its files, in memory that the server maps."""
        arriving = self._reader.landed(packed)
        landed = await asyncio.to_thread(arriving.__enter__)
        try:
            yield landed
        finally:
            arriving.__exit__(None, None, None)
