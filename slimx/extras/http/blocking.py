"""Blocking HTTP requests, for threads without an event loop."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import IO
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from slimx.extras.http.responses import MAX_RESPONSE
from slimx.json_types import Json

MAX_ERROR = 2**16
"""Maximum number of bytes read from an error response."""
PIECE = 2**16
"""Number of bytes read and written at a time."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """An HTTP response that has been read completely."""

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
    redirects: bool = False,
) -> HttpResponse:
    """Sends an HTTP request and returns the response; blocks until then.

    `json` or `data`: body, or a file that is sent from its start. `connect_s`: maximum time in seconds to connect;
    `read_s`: maximum time in seconds without progress afterwards. `most`: maximum number of bytes read from the body of
    a response with status 200. `to`: file to which the body of a response with status 200 is written. `proxies`: True
    to use the proxies that the environment sets. `redirects`: True to follow redirects. Raises ClientError or
    TimeoutError if there is no response, and RuntimeError on a thread with a running event loop.
    """
    if isinstance(data, bytes):
        data = io.BytesIO(data)
    proxy = _proxy_of(url) if proxies else None
    exchange = _fetch(method, url, json, data, dict(headers or {}), connect_s, read_s, most, to, proxy, redirects)
    try:
        with asyncio.Runner() as runner:
            return runner.run(exchange)
    except ValueError as error:  # of a URL, or of a header's value
        raise aiohttp.ClientError(str(error)) from error


def _proxy_of(url: str) -> str | None:
    """Returns the proxy that the environment sets for `url`; None if there is none, or if `no_proxy` contains the host
    or its network."""
    target = urlsplit(url)
    proxies = getproxies()
    proxy = proxies.get(target.scheme, proxies.get("all"))
    if proxy is None or proxy.startswith("socks") or proxy_bypass(target.netloc):  # aiohttp speaks no SOCKS
        return None
    for network in proxies.get("no", "").split(","):
        with suppress(ValueError):
            if ip_address(target.hostname or "") in ip_network(network.strip()):
                return None
    return proxy if "://" in proxy else f"http://{proxy}"


async def _fetch(
    method: str,
    url: str,
    json: Json | None,
    data: IO[bytes] | None,
    headers: dict[str, str],
    connect_s: float,
    read_s: float,
    most: int,
    to: IO[bytes] | None,
    proxy: str | None,
    redirects: bool,
) -> HttpResponse:
    clock = asyncio.get_running_loop().time
    connection = aiohttp.ClientTimeout(total=None, sock_connect=connect_s)
    async with asyncio.timeout(connect_s + read_s) as limit, aiohttp.ClientSession(timeout=connection) as session:

        def progress() -> None:
            limit.reschedule(clock() + read_s)

        body = None
        if data is not None:
            headers["Content-Length"] = str(data.seek(0, io.SEEK_END))
            data.seek(0)
            body = _pieces(data, progress)
        async with session.request(
            method, url, json=json, data=body, headers=headers, proxy=proxy, allow_redirects=redirects
        ) as response:
            if response.status != 200:
                most = MAX_ERROR
                to = None
            content = await _read(response, most, to, progress)
            return HttpResponse(response.status, content, response.headers)


async def _pieces(file: IO[bytes], progress: Callable[[], None]) -> AsyncIterator[bytes]:
    """Yields the content of `file` in pieces and calls `progress` after each. The file stays open, so that the request
    can be repeated."""
    while True:
        piece = await asyncio.to_thread(file.read, PIECE)
        progress()
        if not piece:
            return
        yield piece


async def _read(
    response: aiohttp.ClientResponse, most: int, to: IO[bytes] | None, progress: Callable[[], None]
) -> bytes:
    """Reads the body of `response` until it ends or exceeds `most` bytes. Returns at most `most` bytes; if `to` is
    given, writes everything that is read to `to` instead and returns b"". Calls `progress` after each piece."""
    content = bytearray()
    size = 0
    async for piece in response.content.iter_chunked(PIECE):
        progress()
        size += len(piece)
        if to is not None:
            to.write(piece)
        else:
            content += piece
        if size > most:
            break
    return bytes(content[:most])
