"""A machine's end of a directory to which changes are written (`publish.delta` with `disk`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

from slimx.reshard.packed import PackedBucket


class FilesEnd:
    """Makes whole buckets of files; see `slimx.engines.transport.End`."""

    def __init__(self, item: int) -> None:
        """`item`: bytes of an element."""
        self.item = item
        self._reader: Any = None

    async def prepare(self, host: str, nodes: Any = None) -> None:
        """Import torch, which nothing else needs here."""
        module = await asyncio.to_thread(import_module, "slimx.extras.disk.changes")
        self._reader = module.ChainReader(self.item)

    @asynccontextmanager
    async def landed(self, packed: PackedBucket) -> AsyncIterator[PackedBucket]:
        """The whole bucket, made of its files, in memory that the server opens, for the time of the block."""
        arriving = self._reader.landed(packed)
        landed = await asyncio.to_thread(arriving.__enter__)
        try:
            yield landed
        finally:
            arriving.__exit__(None, None, None)
