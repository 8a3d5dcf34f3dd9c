"""A server with OpenAI's and Anthropic's APIs in front of the engines; what agents sample through it is the rollout.

    agent --POST /SESSION/v1/chat/completions--> ChatProxy --> Session --ctx.engine--> engines
                                                                  |
                                                                  v
                                                            Conversations --> trajectories

A run has one server, which starts with the first session, and a rollout has one session. A session's name is a secret
that only its agent receives, so no other client on the network can sample or add to a rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web

from slimx.data.chat.tokens import PromptIds
from slimx.errors import SlimxError
from slimx.extras.agents.proxy.apis.anthropic_messages import COUNT_TOKENS, MESSAGES
from slimx.extras.agents.proxy.apis.base import ChatApi
from slimx.extras.agents.proxy.apis.openai_chat import CHAT
from slimx.extras.agents.proxy.apis.openai_responses import RESPONSES
from slimx.extras.agents.proxy.bodies import CHARSETS, RequestBody, encoded
from slimx.extras.agents.proxy.conversations import Starts
from slimx.extras.agents.proxy.errors import ApiError
from slimx.extras.agents.proxy.session import TOKEN_CHARACTERS, Session
from slimx.extras.http.connections import Connections, Listening
from slimx.runtime.children import bypass_proxies
from slimx.runtime.ports import address

MAX_BODY = 64 * 2**20
"""Maximum size of a request in bytes; without images, the limit is lower if even a trajectory of maximum
length takes fewer bytes."""
BODY_DEADLINE = 60.0
"""Maximum time in seconds from a request's headers to the end of its body; a slower request is refused."""
IDLE_DEADLINE = 120.0
"""Seconds after which a connection without complete request headers is closed."""
CONNECTIONS = 16384
"""Maximum number of open connections; at the maximum, a new connection closes the one that has been idle longest."""
TOKENIZING = 2
"""Number of threads that tokenize messages."""


class ChatProxy:
    """HTTP server through which a run's agents sample from the policy, in the formats of several APIs."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, context: int, images: bool = False) -> None:
        """Stores the settings without starting the server.

        `port`: 0 for any free port. `context`: maximum length of a trainable trajectory in tokens. `images`: True if
        requests may contain images, whose size does not depend on that length.
        """
        self.context = context
        self._host = host
        self._port = port
        self._sessions: dict[str, tuple[Session, set[asyncio.Task[Any]]]] = {}
        """Sessions by name, each with the tasks of its running requests."""
        self._starts: WeakKeyDictionary[PromptIds, Starts] = WeakKeyDictionary()
        """Token ids of first messages, for each group of rollouts."""
        self._server: Listening | None = None
        self._starting = asyncio.Lock()
        self._url: str
        self._open: Connections
        self._tokenizing: ThreadPoolExecutor
        # A character takes up to 6 bytes, as \uXXXX. The constant is for names and numbers.
        self._most = MAX_BODY if images else min(MAX_BODY, 2**20 + 6 * TOKEN_CHARACTERS * context)
        self.body_deadline = BODY_DEADLINE
        self.idle_deadline = IDLE_DEADLINE
        self.connections = CONNECTIONS

    @contextlib.asynccontextmanager
    async def session(self, session: Session) -> AsyncIterator[str]:
        """Serves `session` inside the block and yields its base URL. Cancels unfinished requests at the end of the
        block."""
        url = await self._start()
        name = secrets.token_urlsafe(16)
        running: set[asyncio.Task[Any]] = set()
        if session.group is not None:
            session.share(self._starts.setdefault(session.group, {}))
        self._sessions[name] = (session, running)
        try:
            yield f"{url}/{name}/v1"
        finally:
            del self._sessions[name]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def stop(self) -> None:
        """Stops the server if it is running."""
        async with self._starting:
            if self._server is not None:
                await self._server.close()
                self._tokenizing.shutdown(wait=False, cancel_futures=True)
                self._server = None

    async def _start(self) -> str:
        """Starts the server if it is not running, and returns its URL."""
        async with self._starting:
            if self._server is None:
                self._open = Connections(most=self.connections, idle=self.idle_deadline)
                app = web.Application(client_max_size=self._most)
                for path, api, answer in (
                    ("chat/completions", CHAT, self._answer),
                    ("responses", RESPONSES, self._answer),
                    ("messages", MESSAGES, self._answer),
                    ("messages/count_tokens", COUNT_TOKENS, self._count),
                ):
                    app.router.add_post(f"/{{session}}/v1/{path}", partial(self._served, api, answer))
                app.router.add_get("/{session}/v1/models", self._models)
                app.router.add_route("*", "/{path:.*}", self._unknown)
                try:
                    # A disconnect cancels the request, because an answer that the agent did not receive is not part of
                    # the rollout.
                    server = await self._open.listen(app, self._host, self._port, handler_cancellation=True)
                except OSError as error:
                    raise SlimxError(
                        f"rollout.proxy: the proxy cannot listen on {address(self._host, self._port)} "
                        f"({error.strerror}); set another host or port in rollout.proxy",
                        code="proxy.address",
                        about="rollout.proxy",
                    ) from None
                bypass_proxies(os.environ, [self._host])  # for the API clients of agents in this process
                self._server = server
                self._url = f"http://{address(self._host, server.port)}"
                self._tokenizing = ThreadPoolExecutor(TOKENIZING, "proxy-tokens")
            return self._url

    async def _answer(self, session: Session, api: ChatApi, http: web.Request) -> web.StreamResponse:
        return await session.answer(api, await self._body(http), http, self._tokenizing)

    async def _count(self, session: Session, api: ChatApi, http: web.Request) -> web.StreamResponse:
        count = await session.count(api, await self._body(http), self._tokenizing)
        return web.Response(body=encoded({"input_tokens": count}), content_type="application/json")

    async def _served(
        self,
        api: ChatApi,
        answer: Callable[[Session, ChatApi, web.Request], Awaitable[web.StreamResponse]],
        http: web.Request,
    ) -> web.StreamResponse:
        """Calls `answer` with the session of the request and returns its response, or an error in the format of
        `api`."""
        session, running = self._sessions.get(http.match_info["session"], (None, set()))
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            if session is None:
                raise ApiError(
                    f"session {http.match_info['session']} does not exist or has ended; use the base URL that the "
                    "current rollout passed to the agent",
                    code="session_not_found",
                    status=404,
                )
            return await answer(session, api, http)
        except ApiError as error:
            return web.json_response(api.refusal(error), status=error.status)
        finally:
            running.discard(task)

    async def _body(self, http: web.Request) -> RequestBody:
        """Reads the request's body. Raises ApiError if it is too long, arrives too late, or has an unsupported
        charset."""
        try:
            # A timer for each request would cost more than reading a body that has already arrived.
            async with contextlib.nullcontext() if http.content.is_eof() else asyncio.timeout(self.body_deadline):
                data = await http.read()
        except web.HTTPRequestEntityTooLarge:
            text = f"the body exceeds {self._most} bytes, the maximum for a context of {self.context} tokens"
            raise ApiError(text, code="body_too_large", status=413, param="messages") from None
        except TimeoutError:
            text = f"the body did not arrive within {self.body_deadline:g} s"
            raise ApiError(text, code="body_deadline", status=408) from None
        charset = (http.charset or "utf-8").lower()
        if charset not in CHARSETS:
            text = f"charset {charset[:100]!r} of Content-Type is not supported; send UTF-8"
            raise ApiError(text, code="invalid_value", param="Content-Type")
        return RequestBody(data, charset)

    async def _models(self, http: web.Request) -> web.Response:
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "slimx"}
        return web.json_response({"object": "list", "data": [model]})

    async def _unknown(self, http: web.Request) -> web.Response:
        error = ApiError(
            f"{http.method} {http.path} is not supported by this server; use only the paths that docs/agents.md lists",
            code="unknown_url",
            status=404,
        )
        return web.json_response(error.body, status=404)
