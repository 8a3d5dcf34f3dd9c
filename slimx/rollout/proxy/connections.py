"""Connections to the proxy: a bounded number of them, and none that stays open without asking anything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Connections:
    """Makes the protocols of a server's connections, counts them and ends those that ask nothing."""

    def __init__(self, make: Callable[[], asyncio.Protocol], *, most: int, idle: float) -> None:
        """`make`: the protocol of one connection; `most`: open at once; `idle`: seconds that one may be open before its
        first request, or between two, whatever bytes trickle in."""
        self._make, self._most, self._idle = make, most, idle
        self._open: dict[asyncio.BaseTransport, _Connection] = {}
        self.refused = 0
        """Connections beyond `most`."""

    def __call__(self) -> asyncio.Protocol:
        return _Connection(self, self._make())

    def __len__(self) -> int:
        return len(self._open)

    def began(self, transport: asyncio.BaseTransport | None) -> None:
        """The headers of a request have come: its own deadlines hold from now on."""
        if (connection := self._open.get(transport)) is not None:
            connection.asked()

    def ended(self, transport: asyncio.BaseTransport | None) -> None:
        """A request is answered: the connection waits for the next."""
        if (connection := self._open.get(transport)) is not None:
            connection.wait(self._idle)

    def enter(self, transport: asyncio.BaseTransport, connection: _Connection) -> bool:
        """Admit a new connection; returns False if there are too many."""
        if len(self._open) >= self._most:
            self.refused += 1
            return False
        self._open[transport] = connection
        connection.wait(self._idle)
        return True

    def leave(self, transport: asyncio.BaseTransport | None) -> None:
        """A connection is closed."""
        self._open.pop(transport, None)


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
