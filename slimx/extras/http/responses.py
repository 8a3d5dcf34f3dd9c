"""Checks of responses from servers outside slimx: limited in size, and only from the requested address."""

from __future__ import annotations

import aiohttp

MAX_RESPONSE = 16 * 2**20
"""Maximum size of a response in bytes."""


async def text_of(response: aiohttp.ClientResponse) -> str:
    """Returns the body of `response` as text. Raises ClientPayloadError if it has more than `MAX_RESPONSE` bytes."""
    content = bytearray()
    async for piece in response.content.iter_chunked(2**16):
        content += piece
        if len(content) > MAX_RESPONSE:
            raise aiohttp.ClientPayloadError(f"the response has more than {MAX_RESPONSE} bytes")
    return content.decode(errors="replace")


async def unredirected(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """Passes a request on, as aiohttp client middleware, and raises ClientResponseError if the response is a redirect.
    Needed for requests that have no `allow_redirects` option, such as websocket handshakes."""
    response = await handler(request)
    if 300 <= response.status < 400:
        response.close()
        raise aiohttp.ClientResponseError(
            response.request_info, (), status=response.status, message="the server redirects to another address"
        )
    return response
