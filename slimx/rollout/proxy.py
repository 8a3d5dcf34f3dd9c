"""An OpenAI-compatible server in front of the engines: what agents sample through it becomes the rollout.

    agent --POST /SESSION/v1/chat/completions--> ChatProxy --> Session --ctx.engine--> engines
                                                                  |
                                                                  v
                                                            Conversations --> trajectories

One server per run, which starts with the first session; one session per rollout. A session's name is a secret that only
its agent gets: nobody else on the network can sample, or add to a rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from slimx.errors import SlimxError
from slimx.ports import address
from slimx.rollout.proxy_request import ApiError
from slimx.rollout.proxy_session import Session

MAX_BODY = 64 * 2**20
"""Bytes of a request."""


class ChatProxy:
    """The server of one run."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, context: int) -> None:
        """`port` 0: any that is free. `context`: tokens of a trajectory that can be trained, at most."""
        self.context = context
        self._host, self._port = host, port
        self._sessions: dict[str, Session] = {}
        self._running: dict[str, set[asyncio.Task[Any]]] = {}
        """Tasks that answer, by session."""
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def session(self, session: Session) -> AsyncIterator[str]:
        """Serve `session` meanwhile; gives its base URL. What is still being answered at the end is cancelled."""
        url = await self._start()
        name = secrets.token_urlsafe(16)
        self._sessions[name], self._running[name] = session, set()
        try:
            yield f"{url}/{name}/v1"
        finally:
            del self._sessions[name]
            running = self._running.pop(name)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def stop(self) -> None:
        """End the server, if it runs."""
        async with self._starting:
            if self._runner is not None:
                await self._runner.cleanup()
                self._runner = None

    async def _start(self) -> str:
        """The address at which it listens."""
        async with self._starting:
            if self._runner is None:
                app = web.Application(client_max_size=MAX_BODY)
                app.router.add_post("/{session}/v1/chat/completions", self._chat)
                app.router.add_get("/{session}/v1/models", self._models)
                app.router.add_route("*", "/{path:.*}", self._unknown)
                # Who goes away ends its request: the answer that nobody got is no part of the rollout.
                runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
                await runner.setup()
                try:
                    await web.TCPSite(runner, self._host, self._port, backlog=1024).start()
                except OSError as error:
                    await runner.cleanup()
                    raise SlimxError(
                        f"rollout.proxy cannot listen on {address(self._host, self._port)} ({error.strerror}); "
                        "choose another host or port"
                    ) from None
                self._runner = runner
            return f"http://{address(self._host, self._runner.addresses[0][1])}"

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        name = http.match_info["session"]
        task = asyncio.current_task()
        try:
            session = self._sessions.get(name)
            if session is None:
                raise ApiError("this session does not exist, or has ended", code="session_not_found", status=404)
            self._running[name].add(task)
            try:
                body = await http.json()
            except ValueError:
                raise ApiError("the body is no JSON", code="invalid_json") from None
            return await session.answer(body, http)
        except ApiError as error:
            return web.json_response(error.body, status=error.status)
        finally:
            self._running.get(name, set()).discard(task)

    async def _models(self, http: web.Request) -> web.Response:
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "slimx"}
        return web.json_response({"object": "list", "data": [model]})

    async def _unknown(self, http: web.Request) -> web.Response:
        error = ApiError(f"{http.method} {http.path} is not served here", code="unknown_url", status=404)
        return web.json_response(error.body, status=404)
