"""Limits what the official SDK reads from an MCP server: the size of its responses and of its standard error."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from slimx.extras.http.responses import MAX_RESPONSE

MAX_STDERR = 2_000
"""Maximum length of a server's standard error that is kept, in bytes; the beginning is dropped."""


def bounded_client(headers: dict[str, str], timeout_s: float) -> Any:
    """Returns an HTTP client for the SDK that follows no redirects and reads at most `MAX_RESPONSE` bytes per response.

    `timeout_s`: seconds without data after which a request fails.
    """
    import httpx2  # the HTTP library of the SDK

    class Bounded(httpx2.AsyncByteStream):
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            left = MAX_RESPONSE
            async for piece in self._stream:
                left -= len(piece)
                if left < 0:
                    raise httpx2.ReadError(f"the response has more than {MAX_RESPONSE} bytes")
                yield piece

        async def aclose(self) -> None:
            await self._stream.aclose()

    async def bound(response: Any) -> None:
        if response.headers.get("content-encoding", "identity") != "identity":  # could expand from bytes to gigabytes
            raise httpx2.DecodingError("the response is compressed")
        response.stream = Bounded(response.stream)

    return httpx2.AsyncClient(
        headers={"Accept-Encoding": "identity"} | headers,
        timeout=httpx2.Timeout(timeout_s),
        event_hooks={"response": [bound]},
    )


class Stderr:
    """Buffer that keeps the end of a server's standard error. The server writes to `file`, the write end of a pipe."""

    def __init__(self) -> None:
        self._read_end, write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self.file = os.fdopen(write_end, "w")
        self._tail = b""
        self.note = ""
        """Reason why the client closed the session, for error messages."""
        asyncio.get_running_loop().add_reader(self._read_end, self._read)

    def text(self) -> str:
        """Returns the last `MAX_STDERR` bytes as text."""
        for _ in range(16):  # 16 reads of 64 KiB empty the largest pipe
            self._read()
        return self._tail.decode(errors="replace").strip()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._read_end)
        os.close(self._read_end)
        self.file.close()

    def _read(self) -> None:
        with suppress(BlockingIOError):
            self._tail = (self._tail + os.read(self._read_end, 2**16))[-MAX_STDERR:]
