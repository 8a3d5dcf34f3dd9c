"""HTTP requests from threads without an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import IO

import aiohttp

from slimx.extras.http.responses import MAX_RESPONSE
from slimx.json_types import Json

MAX_ERROR = 2**16
"""Maximum size of the content of an error response, in bytes. The rest is not read."""
PIECE = 2**16
"""Bytes that are read and written at once."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A response whose content has been read."""

    status: int
    content: bytes
    headers: Mapping[str, str]


def fetch(
    method: str,
    url: str,
    *,
    json: Json | None = None,
    data: bytes | IO[bytes] | None = None,
    headers: Mapping[str, str] | None = None,
    connect_s: float,
    read_s: float,
    most: int = MAX_RESPONSE,
    to: IO[bytes] | None = None,
    proxies: bool = True,
) -> HttpResponse:
    """Sends a request and returns the response, without following redirects.

    `data`: body, or a file with the body, from its start. `connect_s`, `read_s`: seconds to connect, and to wait for
    data. `most`: maximum bytes of content with status 200; the rest is not read. `to`: file that receives the content
    with status 200 instead. `proxies`: uses the environment's proxies. Raises ClientError or TimeoutError without a
    response."""
    request = _fetch(method, url, json, data, dict(headers or {}), connect_s, read_s, most, to, proxies)
    with asyncio.Runner() as runner:
        return runner.run(request)


async def _fetch(
    method: str,
    url: str,
    json: Json | None,
    data: bytes | IO[bytes] | None,
    headers: dict[str, str],
    connect_s: float,
    read_s: float,
    most: int,
    to: IO[bytes] | None,
    proxies: bool,
) -> HttpResponse:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=read_s)
    body: bytes | AsyncIterator[bytes] | None
    if data is None or isinstance(data, bytes):
        body = data
    else:
        headers["Content-Length"] = str(data.seek(0, 2))
        data.seek(0)
        body = _pieces(data)
    async with (
        aiohttp.ClientSession(timeout=timeout, trust_env=proxies) as session,
        session.request(method, url, json=json, data=body, headers=headers, allow_redirects=False) as response,
    ):
        if response.status == 200:
            content = await _read(response, most, to)
        else:
            content = await _read(response, MAX_ERROR, None)
        return HttpResponse(response.status, content, dict(response.headers))


async def _pieces(file: IO[bytes]) -> AsyncIterator[bytes]:
    """Yields the content of a file, which stays open for another attempt."""
    while True:
        piece = await asyncio.to_thread(file.read, PIECE)
        if not piece:
            return
        yield piece


async def _read(response: aiohttp.ClientResponse, most: int, to: IO[bytes] | None) -> bytes:
    """Returns the content of a response, up to `most` bytes, or writes it to `to`."""
    content = bytearray()
    size = 0
    async for piece in response.content.iter_chunked(PIECE):
        size += len(piece)
        if to is not None:
            to.write(piece)
        else:
            content += piece
        if size > most:
            break
    return bytes(content[:most])
