"""The run's server of chat completions, which starts with its first session."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slimx.extras.agents.proxy.server import ChatProxy
    from slimx.extras.agents.proxy.session import Session


class HttpServer:
    """A `slimx.rollout.hooks.AgentServer`, an entry point of `slimx.agent_servers`."""

    def __init__(self, host: str, port: int, *, context: int) -> None:
        """`port` 0: any that is free. `context`: tokens of a trajectory that can be trained, at most."""
        self.context = context
        self._host, self._port = host, port
        self._proxy: ChatProxy | None = None

    @contextlib.asynccontextmanager
    async def session(self, session: Session) -> AsyncIterator[str]:
        """Serve `session` inside the block; gives its base URL."""
        if self._proxy is None:
            from slimx.extras.agents.proxy.server import ChatProxy

            self._proxy = ChatProxy(self._host, self._port, context=self.context)
        async with self._proxy.session(session) as url:
            yield url

    async def stop(self) -> None:
        """End the server, if it runs."""
        if self._proxy is not None:
            await self._proxy.stop()
