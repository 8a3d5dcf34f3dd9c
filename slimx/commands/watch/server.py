"""The HTTP server of the live page: a few fixed addresses, read only, for whoever may ask."""

from __future__ import annotations

import gzip
import hmac
import ipaddress
import secrets
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from slimx.commands.watch.content import Content
from slimx.errors import SlimxError
from slimx.observability.report.report import PLOTLY

COOKIE = "slimx_watch"
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
    token = None if _is_loopback(host) else secrets.token_urlsafe(32)
    config = uvicorn.Config(
        application(content, host, token), host=host, port=port, log_level="critical", lifespan="off"
    )
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
    listener.listen()  # whoever opens the address at once waits
    shown = f"[{host}]" if ":" in host else host
    key = "" if token is None else f"?token={token}"
    say(f"http://{shown}:{listener.getsockname()[1]}/{key}")
    uvicorn.Server(config).run(sockets=[listener])


def application(content: Content, host: str, token: str | None) -> Starlette:
    """The page as an ASGI application. `token`: whoever asks must have it, as `?token=` once and as a cookie from then
    on; None: whoever reaches `host`, a loopback address, may look."""

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
        *(Route(path, _guarded(page(path), host, token)) for path in FILES),
        Route("/plotly.js", _guarded(plotly, host, token)),
        *(
            Route(path, _guarded(data(read), host, token))
            for path, read in {
                "/api/status": lambda request: content.status(),
                "/api/charts": lambda request: content.charts(request.query_params.get("since", "")),
                "/api/steps": lambda request: content.steps(),
                "/api/steps/{step:int}": lambda request: content.rollouts(request.path_params["step"]),
                "/api/steps/{step:int}/tokens": lambda request: content.tokens(
                    request.path_params["step"], request.query_params.get("group", "")
                ),
            }.items()
        ),
    ]
    return Starlette(routes=routes)


def _guarded(
    answer: Callable[[Request], Awaitable[Response]], host: str, token: str | None
) -> Callable[[Request], Awaitable[Response]]:
    """`answer`, for whoever may ask, with the headers of every answer."""

    async def guarded(request: Request) -> Response:
        response = _refusal(request, host, token) or await answer(request)
        response.headers.update(HEADERS)
        return response

    return guarded


def _refusal(request: Request, host: str, token: str | None) -> Response | None:
    if token is None:
        # A page of another site could have the browser ask here under its own name (DNS rebinding).
        name = request.url.hostname or ""
        return None if name == "localhost" or _is_loopback(name) else PlainTextResponse("not this host", 403)
    if (given := request.query_params.get("token")) is not None and _same(given, token):
        response = RedirectResponse(request.url.path, 303)
        response.set_cookie(COOKIE, token, httponly=True, samesite="strict")
        return response
    if _same(request.cookies.get(COOKIE, ""), token):
        return None
    return PlainTextResponse("open the address that slimx watch has printed, with its token", 403)


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
