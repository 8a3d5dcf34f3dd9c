"""The HTTP server of the live page: a few fixed addresses, read only, for requests with its token."""

from __future__ import annotations

import gzip
import hmac
import re
import secrets
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlencode

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from slimx.errors import SlimxError
from slimx.extras.watch.page.connections import BoundedConnection
from slimx.extras.watch.page.content import Content
from slimx.extras.watch.report.report import PLOTLY
from slimx.runtime.private import private_directory, private_token

HOST = re.compile(r"([\w.-]+|\[[\da-fA-F:.]+\])(:\d{1,5})?", re.ASCII)
"""A Host header that names a server."""
FILES = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
HEADERS = {
    # plotly.js styles what it draws; scripts come from this server alone, and text of a run is never markup.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src data: blob:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def serve(directory: Path, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve the page of the run in `directory` until Ctrl-C. `say` is told where it is.

    Raises SlimxError for a directory without a run, and for an address that cannot be listened at."""
    content = Content(directory)
    token = private_token(private_directory() / "watch-token")
    config = configured(application(content, token), host, port)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise SlimxError(
            f"--port: {host}:{port} cannot be listened at ({error.strerror}); give another port, or 0 for any that is "
            "free",
            code="watch.port",
            about="--port",
        ) from None
    listener.listen()  # a browser that opens the address at once waits
    shown = f"[{host}]" if ":" in host else host
    say(f"http://{shown}:{listener.getsockname()[1]}/?token={token}")
    uvicorn.Server(config).run(sockets=[listener])


def configured(application: Starlette, host: str, port: int) -> uvicorn.Config:
    """Returns uvicorn's configuration for the page."""
    return uvicorn.Config(
        application, host=host, port=port, http=BoundedConnection, ws="none", log_level="critical", lifespan="off"
    )


def application(content: Content, token: str) -> Starlette:
    """Returns the page as an ASGI application. A request needs `token` as `?token=`, and gets a cookie for the next
    ones."""
    access = _Access(token)

    def page(path: str) -> Callable[[Request], Awaitable[Response]]:
        name, kind = FILES[path]
        body = Path(__file__).with_name(name).read_bytes()

        async def answer(request: Request) -> Response:
            return Response(body, media_type=kind)

        return answer

    packed = PLOTLY.read_bytes()

    async def plotly(request: Request) -> Response:
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(packed, media_type="text/javascript", headers={"Content-Encoding": "gzip"})
        return Response(gzip.decompress(packed), media_type="text/javascript")

    def data(read: Callable[[Request], object]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                found = await run_in_threadpool(read, request)
            except SlimxError as error:
                return _json({"error": str(error), "code": error.code}, 404)
            return _json(found)

        return answer

    routes = [
        *(Route(path, _guarded(page(path), access)) for path in FILES),
        Route("/plotly.js", _guarded(plotly, access)),
        *(
            Route(path, _guarded(data(read), access))
            for path, read in {
                "/api/status": lambda request: content.status(),
                "/api/charts": lambda request: content.charts(request.query_params.get("since", "")),
                "/api/steps": lambda request: content.steps(),
                "/api/steps/{step}": lambda request: content.rollouts(_step(request)),
                "/api/steps/{step}/tokens": lambda request: content.tokens(
                    _step(request), request.query_params.get("group", "")
                ),
            }.items()
        ),
    ]
    return Starlette(routes=routes)


class _Access:
    """Decides which requests are answered. The cookie is this process's alone: sent to another server, which has taken
    the port since, it opens nothing."""

    def __init__(self, token: str) -> None:
        self._token, self._secret = token, secrets.token_urlsafe(32)
        # Browsers send the cookies of all ports of a host.
        self._cookie = f"slimx_watch_{secrets.token_hex(4)}"

    def refusal(self, request: Request) -> Response | None:
        """Returns the response that replaces the page's; None for a request with the cookie."""
        if not HOST.fullmatch(request.headers.get("host", "")):
            return PlainTextResponse("the Host header names no server", 400)
        query = dict(request.query_params)
        if _same(query.pop("token", ""), self._token):
            response = RedirectResponse(f"{request.scope['path']}?{urlencode(query)}".removesuffix("?"), 303)
            response.set_cookie(self._cookie, self._secret, httponly=True, samesite="strict")
            return response
        if _same(request.cookies.get(self._cookie, ""), self._secret):
            return None
        return PlainTextResponse("open the address that slimx watch has printed, with its token", 403)


def _guarded(
    answer: Callable[[Request], Awaitable[Response]], access: _Access
) -> Callable[[Request], Awaitable[Response]]:
    """`answer`, for requests that may see it, with the headers of every answer."""

    async def guarded(request: Request) -> Response:
        response = access.refusal(request) or await answer(request)
        response.headers.update(HEADERS)
        return response

    return guarded


def _step(request: Request) -> int:
    """Returns the step of a path. Raises SlimxError for what is no number, or has more digits than Python reads."""
    step = request.path_params["step"]
    if not re.fullmatch(r"\d{1,18}", step, re.ASCII):
        raise SlimxError(f"{step[:20]!r} is no step; give a number", code="rollouts.step", about="step")
    return int(step)


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
