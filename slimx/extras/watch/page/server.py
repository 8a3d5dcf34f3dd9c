"""HTTP server of the live page. It serves a few fixed paths, read-only, to clients that present the server's token."""

from __future__ import annotations

import asyncio
import errno
import gzip
import hmac
import os
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
from aiohttp import web

from slimx.errors import SlimxError
from slimx.extras.http.connections import Connections, Listening
from slimx.extras.report.report import PLOTLY
from slimx.extras.watch.page.content import Content
from slimx.runtime.user_files import private_directory, private_token

HOST = re.compile(r"([\w.-]+|\[[\da-fA-F:.]+\])(:\d{1,5})?", re.ASCII)
"""Regular expression for a Host header with a valid server name."""
FILES = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
HEADERS = {
    # plotly.js sets styles; scripts are loaded only from this server, and text of a run is never interpreted as HTML.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


MOST = 256
"""Maximum number of open connections."""
IDLE_S = 60.0
"""Timeout in seconds after which a connection without a request is closed."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def serve(directories: Sequence[Path], host: str, port: int, say: Callable[[str], None]) -> None:
    """Serves the page of the run in the first of `directories` until Ctrl-C, with curves of the runs in the others.
    `say` receives the page's URL.

    Raises SlimxError if there is no run in a directory, or if the server cannot listen on `host` and `port`."""
    content = Content(*directories)
    token = private_token(private_directory() / "watch-token")

    async def run() -> None:
        listening = await listen(content, token, host, port)
        shown = f"[{host}]" if ":" in host else host
        say(f"http://{shown}:{listening.port}/?token={token}")
        await asyncio.Event().wait()

    asyncio.run(run())


async def listen(content: Content, token: str, host: str, port: int) -> Listening:
    """Starts serving the page with `content`. Raises SlimxError if it cannot listen on `host` and `port`."""
    try:
        return await Connections(most=MOST, idle=IDLE_S).listen(application(content, token), host, port)
    except (OSError, UnicodeError) as error:
        if isinstance(error, socket.gaierror | UnicodeError) or error.errno == errno.EADDRNOTAVAIL:
            raise SlimxError(
                f"--host: {host} is not an address of this machine; give one that is, or 127.0.0.1 to serve this "
                "machine alone",
                code="watch.host",
                about="--host",
            ) from None
        raise SlimxError(
            f"--port: slimx cannot listen on {host}:{port} ({os.strerror(error.errno or 0)}); give another port, or "
            "0 for any free port",
            code="watch.port",
            about="--port",
        ) from None


def application(content: Content, token: str) -> web.Application:
    """Returns the web application that serves the page. The first request must contain `?token=TOKEN`; its response
    sets a cookie that permits later requests."""

    def page(name: str, kind: str) -> Handler:
        body = Path(__file__).with_name(name).read_bytes()

        async def respond(request: web.Request) -> web.Response:
            return web.Response(body=body, content_type=kind, charset="utf-8")

        return respond

    packed = PLOTLY.read_bytes()

    async def plotly(request: web.Request) -> web.Response:
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers = {"Content-Encoding": "gzip"}
            return web.Response(body=packed, content_type="text/javascript", headers=headers)
        return web.Response(body=gzip.decompress(packed), content_type="text/javascript")

    def data(read: Callable[[web.Request], object]) -> Handler:
        async def respond(request: web.Request) -> web.Response:
            status = 200
            try:
                values: object = await asyncio.to_thread(read, request)
            except SlimxError as error:
                values = {"error": str(error), "code": error.code}
                status = 404
            if isinstance(values, bytes):
                return web.Response(body=values, content_type="image/png")
            return web.Response(body=msgspec.json.encode(values), status=status, content_type="application/json")

        return respond

    handlers = {
        **{path: page(*file) for path, file in FILES.items()},
        "/plotly.js": plotly,
        "/api/status": data(lambda request: content.status()),
        "/api/charts": data(lambda request: content.charts(request.query.get("since", ""))),
        "/api/steps": data(lambda request: content.steps()),
        "/api/steps/{step}": data(lambda request: content.rollouts(_step(request))),
        "/api/steps/{step}/tokens": data(
            lambda request: content.tokens(_step(request), request.query.get("group", ""))
        ),
        "/api/steps/{step}/image": data(
            lambda request: content.image(
                _step(request), request.query.get("group", ""), request.query.get("index", "")
            )
        ),
    }
    app = web.Application(middlewares=[_Access(token).guarded])
    app.add_routes([web.get(path, respond) for path, respond in handlers.items()])
    return app


class _Access:
    """Access control for requests. The cookie is valid only for this process, so that another server that later listens
    on the same port cannot use the cookie."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._secret = secrets.token_urlsafe(32)
        # Browsers send a host's cookies to all of its ports.
        self._cookie = f"slimx_watch_{secrets.token_hex(4)}"

    @web.middleware
    async def guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Serves permitted requests, refuses all others, and adds the security headers to every response."""
        try:
            response = self._refusal(request) or await handler(request)
        except web.HTTPException as unknown:
            allowed = {name: value for name, value in unknown.headers.items() if name == "Allow"}
            response = web.Response(text=unknown.text, status=unknown.status, headers=allowed)
        response.headers.update(HEADERS)
        return response

    def _refusal(self, request: web.Request) -> web.Response | None:
        """Returns a response to a request that must not be served: an error, or the redirect that sets the cookie.
        Returns None for a request with the cookie."""
        if not HOST.fullmatch(request.headers.get("host", "")):
            return web.Response(text="the Host header is not a valid server name", status=400)
        known = request.match_info.http_exception is None  # a path of another server must not set the cookie
        if known and _same(request.query.get("token", ""), self._token):
            location = str(request.rel_url.without_query_params("token"))
            response = web.Response(status=303, headers={"Location": location})
            response.set_cookie(self._cookie, self._secret, httponly=True, samesite="Strict")
            return response
        if _same(request.cookies.get(self._cookie, ""), self._secret):
            return None
        return web.Response(text="open the URL that slimx watch printed, including its token", status=403)


def _step(request: web.Request) -> int:
    """Returns the step in the request's path. Raises SlimxError if it is not a number, or has more than 18 digits."""
    step = request.match_info["step"]
    if not re.fullmatch(r"\d{1,18}", step, re.ASCII):
        raise SlimxError(
            f"the URL contains {step[:20]!r} in place of a step number; request a URL with the number of a saved step",
            code="rollouts.step",
            about="step",
        )
    return int(step)


def _same(candidate: str, token: str) -> bool:
    return hmac.compare_digest(candidate.encode(errors="surrogateescape"), token.encode())
