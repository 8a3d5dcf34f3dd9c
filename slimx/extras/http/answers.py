"""Answers of servers that are not slimx's own: of a bounded length, and from the address that was asked."""

from __future__ import annotations

import aiohttp

MAX_ANSWER = 16 * 2**20
"""Bytes of an answer that are read."""


async def text_of(answer: aiohttp.ClientResponse) -> str:
    """Returns the text of an answer. Raises ClientPayloadError for one of more than `MAX_ANSWER` bytes."""
    read = bytearray()
    async for piece in answer.content.iter_chunked(2**16):
        read += piece
        if len(read) > MAX_ANSWER:
            raise aiohttp.ClientPayloadError(f"it answered with more than {MAX_ANSWER} bytes")
    return read.decode(errors="replace")


async def unredirected(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """A middleware of requests that have no `allow_redirects`, as those for websockets. Raises ClientResponseError for
    a redirect."""
    answer = await handler(request)
    if 300 <= answer.status < 400:
        answer.close()
        raise aiohttp.ClientResponseError(
            answer.request_info, (), status=answer.status, message="it redirects to another address"
        )
    return answer
