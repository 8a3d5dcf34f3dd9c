"""The run's chat completion server for agents, which starts with the first session."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slimx.extras.agents.proxy.server import ChatProxy
    from slimx.extras.agents.proxy.session import Session


class HttpServer:
    """Implementation of `slimx.rollout.hooks.AgentServer`, registered as an entry point in `slimx.agent_servers`."""

    def __init__(self, host: str, port: int, *, context: int) -> None:
        """Stores the settings without starting the server.

        `port`: 0 for any free port. `context`: maximum length of a trainable trajectory in tokens.
        """
        self.context = context
        self._host = host
        self._port = port
        self._proxy: ChatProxy | None = None

    @contextlib.asynccontextmanager
    async def session(self, session: Session) -> AsyncIterator[str]:
        """Serves `session` inside the block and yields its base URL. The first session starts the server."""
        if self._proxy is None:
            from slimx.extras.agents.proxy.server import ChatProxy

            self._proxy = ChatProxy(self._host, self._port, context=self.context, images=session.takes_images)
        async with self._proxy.session(session) as url:
            yield url

    async def stop(self) -> None:
        """Stops the server if it is running."""
        if self._proxy is not None:
            await self._proxy.stop()
