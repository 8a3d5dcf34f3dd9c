"""Connections to the live page: a bounded number of them, and none that stays open without asking anything."""

from __future__ import annotations

import asyncio
import time

from uvicorn.protocols.http.h11_impl import H11Protocol


class BoundedConnection(H11Protocol):
    """One connection. uvicorn itself ends only those that wait for another request."""

    most = 256
    """Connections that may be open at the same time; one more ends the one that has asked nothing for longest."""
    idle = 60.0
    """Seconds that a connection may take for a request, whatever bytes trickle in."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = time.monotonic()  # the loop's own is the same for all that come in one turn
        self._timer = asyncio.get_running_loop().call_later(self.idle, self._end)
        # One that was aborted is listed until the loop's next turn, and several connections may come in one turn.
        alive = [each for each in self.connections if not each.transport.is_closing()]
        if len(alive) > self.most:
            waiting = [each for each in alive if isinstance(each, BoundedConnection) and not each._answers()]
            min(waiting, key=lambda each: each._since).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def _answers(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _end(self) -> None:
        if self._answers():
            self._timer = asyncio.get_running_loop().call_later(self.idle, self._end)
        else:
            self.transport.abort()
