"""Connections of an HTTP server: limited in number, closed when idle, with few log lines about malformed requests."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

BACKLOG = 1024
"""Maximum number of connections that the kernel queues until the server accepts them."""
REPORT_S = 60.0
"""Minimum number of seconds between two log lines about malformed requests."""


class Connections:
    """Open connections of a server, which are counted, limited and closed when idle. Compressed request bodies are
    rejected."""

    def __init__(self, *, most: int, idle: float) -> None:
        """Sets the limits.

        `most`: maximum number of open connections. `idle`: seconds after which a connection without a complete request
        is closed, before its first request or between two, even if single bytes arrive."""
        self._most = most
        self._idle = idle
        self._open: dict[asyncio.Transport | None, _GuardedProtocol] = {}
        self._waiting: dict[asyncio.Transport | None, None] = {}
        """Connections that are waiting for a request; the one that has waited longest is first."""
        self.refused = 0
        """Number of connections that were closed because more than `most` were open."""
        self.malformed = 0
        """Number of requests so far that were not valid HTTP."""
        self._report_at = 0.0

    def __len__(self) -> int:
        return len(self._open)

    async def listen(self, app: web.Application, host: str, port: int, **options: Any) -> Listening:
        """Serves `app` at `host` and `port`, and returns the running server. `options`: arguments of `web.AppRunner`.
        Raises OSError if the address cannot be used."""
        app.middlewares.insert(0, self._watched)
        log = logging.Logger("slimx.http")
        log.parent = logging.getLogger()
        log.addFilter(self._is_logged)
        # A few compressed bytes could expand to gigabytes and block the event loop.
        options |= {"access_log": None, "auto_decompress": False, "logger": log, "shutdown_timeout": 1.0}
        runner = web.AppRunner(app, **options)
        await runner.setup()
        loop = asyncio.get_running_loop()
        _report_once(loop)
        make = runner.server
        assert make is not None, "set by setup()"
        try:
            server = await loop.create_server(lambda: _GuardedProtocol(self, make()), host, port, backlog=BACKLOG)
        except OSError:
            await runner.cleanup()
            raise
        return Listening(server, runner)

    def _is_logged(self, record: logging.LogRecord) -> bool:
        """Filters log records: counts malformed requests, drops aiohttp's traceback for each, and logs one short line
        per `REPORT_S` instead. Returns True for all other records."""
        if record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError):
            return True
        self.malformed += 1
        now = time.monotonic()
        if now < self._report_at:
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
        """Handles a request, as aiohttp middleware, and suspends the connection's idle timeout until the request is
        handled."""
        transport = request.transport
        connection = self._open.get(transport)
        if connection is not None:
            self._waiting.pop(transport, None)
            connection.stop_waiting()
        try:
            if request.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise web.HTTPUnsupportedMediaType(text="send the body without a Content-Encoding")
            return await handler(request)
        except web.RequestPayloadError as error:
            self.malformed += 1
            raise web.HTTPBadRequest(text=f"{error}"[:200]) from error
        finally:
            connection = self._open.get(transport)
            if connection is not None:
                self._wait(transport, connection)

    def enter(self, transport: asyncio.Transport, connection: _GuardedProtocol) -> bool:
        """Admits a new connection and returns True.

        If too many are open, the one that has been idle longest is closed. If none is idle, the new connection is not
        admitted and False is returned."""
        if len(self._open) >= self._most:
            self.refused += 1
            if not self._waiting:
                return False
            longest = next(iter(self._waiting))
            idle = self._open[longest]
            self.leave(longest)
            idle.abort()
        self._open[transport] = connection
        self._wait(transport, connection)
        return True

    def leave(self, transport: asyncio.Transport | None) -> None:
        """Removes a closed connection from the set of open connections."""
        self._open.pop(transport, None)
        self._waiting.pop(transport, None)

    def _wait(self, transport: asyncio.Transport | None, connection: _GuardedProtocol) -> None:
        self._waiting[transport] = None
        connection.wait(self._idle)


@dataclass(frozen=True, slots=True)
class Listening:
    """A running HTTP server."""

    server: asyncio.Server
    runner: web.AppRunner

    @property
    def port(self) -> int:
        return self.server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stops the server and cancels its requests."""
        self.server.close()
        await self.runner.cleanup()


def _report_once(loop: asyncio.AbstractEventLoop) -> None:
    """Makes `loop` report only once that connections cannot be accepted. asyncio reports every attempt, a thousand
    times per second."""
    previous = loop.get_exception_handler()
    reported = False

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal reported
        if "socket.accept()" not in context.get("message", ""):
            if previous is not None:
                previous(loop, context)
            else:
                loop.default_exception_handler(context)
        elif not reported:
            reported = True
            print(
                f"connections cannot be accepted ({context.get('exception')}); raise the limit of open files "
                "(ulimit -n). This is reported only once.",
                file=sys.stderr,
                flush=True,
            )

    loop.set_exception_handler(handle)


class _GuardedProtocol(asyncio.Protocol):
    """Wrapper around `inner`, aiohttp's protocol for an admitted connection: aborts the connection if it is idle for
    too long, and forwards all other events to `inner`."""

    def __init__(self, connections: Connections, inner: asyncio.Protocol) -> None:
        self._connections = connections
        self._inner = inner
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._served = False

    def wait(self, seconds: float) -> None:
        """Aborts the connection after `seconds`, unless `stop_waiting` is called before then."""
        self.stop_waiting()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.abort)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._served = self._connections.enter(self._transport, self)
        if self._served:
            self._inner.connection_made(transport)
        else:
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.stop_waiting()
        self._connections.leave(self._transport)
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
