"""Connections to an HTTP server: a bounded number of them, none that stays open without asking anything, and few lines
in the log about requests that are no HTTP."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

BACKLOG = 1024
"""Connections that the kernel accepts before the server does."""
REPORT_S = 60.0
"""Seconds between two lines about malformed requests."""


class Connections:
    """Makes the protocols of a server's connections, counts them and ends those that ask nothing. Bodies are not
    compressed."""

    def __init__(self, *, most: int, idle: float) -> None:
        """`most`: connections open at once; `idle`: seconds that one may be open before its first request, or between
        two, whatever bytes trickle in."""
        self._most, self._idle = most, idle
        self._open: dict[asyncio.BaseTransport, _Connection] = {}
        self._waiting: dict[asyncio.BaseTransport, None] = {}
        """Those that wait for a request, the longest first."""
        self.refused = 0
        """Connections that were ended because there were more than `most`."""
        self.malformed = 0
        """Requests that were no HTTP."""
        self._report_at = 0.0

    def __len__(self) -> int:
        return len(self._open)

    async def listen(self, app: web.Application, host: str, port: int, **options: Any) -> Listening:
        """Serve `app` at `host` and `port`; `options` are those of `web.AppRunner`. Raises OSError if it cannot."""
        app.middlewares.insert(0, self._watched)
        log = logging.Logger("slimx.http")
        log.parent = logging.getLogger()
        log.addFilter(self._is_logged)
        # A few compressed bytes would become gigabytes, while the loop waits.
        options |= {"access_log": None, "auto_decompress": False, "logger": log, "shutdown_timeout": 1.0}
        runner = web.AppRunner(app, **options)
        await runner.setup()
        loop = asyncio.get_running_loop()
        _report_once(loop)
        make = runner.server
        try:
            server = await loop.create_server(lambda: _Connection(self, make()), host, port, backlog=BACKLOG)
        except OSError:
            await runner.cleanup()
            raise
        return Listening(server, runner)

    def _is_logged(self, record: logging.LogRecord) -> bool:
        """Counts malformed requests, of which aiohttp logs a traceback for each; shortens one in `REPORT_S`."""
        if record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError):
            return True
        self.malformed += 1
        if (now := time.monotonic()) < self._report_at:
            return False
        self._report_at = now + REPORT_S
        record.msg = "%d malformed HTTP requests so far, the last: %.200r"
        record.args = (self.malformed, str(record.exc_info[1]))
        record.exc_info = None
        return True

    @web.middleware
    async def _watched(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """A connection may wait for its next request only so long; while one is answered its own deadlines hold."""
        transport = request.transport
        if (connection := self._open.get(transport)) is not None:
            self._waiting.pop(transport, None)
            connection.asked()
        try:
            if request.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise web.HTTPUnsupportedMediaType(text="send the body without a Content-Encoding")
            return await handler(request)
        except web.RequestPayloadError as error:
            self.malformed += 1
            raise web.HTTPBadRequest(text=f"{error}"[:200]) from error
        finally:
            if (connection := self._open.get(transport)) is not None:
                self._wait(transport, connection)

    def enter(self, transport: asyncio.BaseTransport, connection: _Connection) -> bool:
        """Admit a new connection. If there are too many, the one that has waited longest for a request makes room;
        returns False if all are being answered."""
        if len(self._open) >= self._most:
            self.refused += 1
            if not self._waiting:
                return False
            longest = next(iter(self._waiting))
            self.leave(longest)
            longest.abort()
        self._open[transport] = connection
        self._wait(transport, connection)
        return True

    def leave(self, transport: asyncio.BaseTransport | None) -> None:
        """Forget a connection that is closed."""
        self._open.pop(transport, None)
        self._waiting.pop(transport, None)

    def _wait(self, transport: asyncio.BaseTransport, connection: _Connection) -> None:
        self._waiting[transport] = None
        connection.wait(self._idle)


@dataclass(frozen=True, slots=True)
class Listening:
    """A server that serves."""

    server: asyncio.Server
    runner: web.AppRunner

    @property
    def port(self) -> int:
        return self.server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """End it, and its requests."""
        self.server.close()
        await self.runner.cleanup()


def _report_once(loop: asyncio.AbstractEventLoop) -> None:
    """Report once that connections cannot be accepted: asyncio does so for each, a thousand times a second."""
    before, reported = loop.get_exception_handler(), False

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal reported
        if "socket.accept()" not in context.get("message", ""):
            before(loop, context) if before is not None else loop.default_exception_handler(context)
        elif not reported:
            reported = True
            print(
                f"connections cannot be accepted ({context.get('exception')}); raise the limit of open files "
                "(ulimit -n). Said once.",
                file=sys.stderr,
                flush=True,
            )

    loop.set_exception_handler(handle)


class _Connection(asyncio.Protocol):
    """Passes everything on to the protocol that serves the connection."""

    def __init__(self, all: Connections, inner: asyncio.Protocol) -> None:
        self._all, self._inner = all, inner
        self._transport: asyncio.BaseTransport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._served = False

    def wait(self, seconds: float) -> None:
        """End the connection after `seconds` without a request."""
        self.asked()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._transport.abort)

    def asked(self) -> None:
        """Stop waiting."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._served = self._all.enter(transport, self)
        if self._served:
            self._inner.connection_made(transport)
        else:
            transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.asked()
        self._all.leave(self._transport)
        if self._served:
            self._inner.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self._served:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._served else None

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()
