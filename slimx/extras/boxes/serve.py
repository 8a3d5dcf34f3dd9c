"""The reference server of remote boxes, over HTTP:

    python -m slimx.extras.boxes.serve --backend bubblewrap --images images/ --host 0.0.0.0 --token-env TOKEN

    GET    /v1/                         {"protocol": 1, "boxes", "held", "expired", "left", "lease_s"}
    GET    /v1/images/NAME              200 or 404          PUT  /v1/images/sha256-HEX    an archive
    PUT    /v1/boxes/ID                 {"image", "limits"} -> {"lease_s"}; 503 with Retry-After while there is none
    POST   /v1/boxes/ID/lease           every other call renews it, too
    PUT    /v1/boxes/ID/runs/RUN        {"command", "stdin", "cwd"}
    GET    /v1/boxes/ID/runs/RUN?wait=S 200 with its end, or 202 after S seconds         DELETE: stop it
    PUT    /v1/boxes/ID/file?path=P     GET .../file?path=P&most=BYTES                   GET .../snapshot
    DELETE /v1/boxes/ID

Clients name boxes and runs by random hexadecimal digits. A refusal is {"code", "error", "about"} with status 400, 401
or 413; a box that is no more is 404.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import resource
import signal
import tempfile
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from slimx.errors import SlimxError, raised
from slimx.extras.boxes import roots
from slimx.extras.boxes.choice import LIMITS, BoxOptions
from slimx.extras.boxes.engines import ContainerEngine
from slimx.extras.boxes.held import UPLOADED, Boxes, Held, Images, limits_within
from slimx.extras.boxes.programs.enclosure import MIB, Ran
from slimx.extras.boxes.programs.watch import Limits
from slimx.extras.boxes.protocol import Box, BoxRefusal, check_run
from slimx.extras.boxes.remote import MAX_FILE, PROTOCOL
from slimx.extras.http.access import permitted, token_of
from slimx.extras.http.connections import Connections
from slimx.runtime.ports import address

MAX_BODY = 2 * MIB
"""Bytes of a request that is no file and no archive."""
MAX_WAIT, BODY_S, UPLOAD_S = 30.0, 60.0, 600.0
"""Seconds for which a question whether a program has ended is held, for a whole request, and for a whole archive."""
IDLE_S = 20.0
"""Seconds that a connection may be open without a whole request's headers."""
CONNECTIONS = 4096
"""Connections that may be open at the same time; at most half of the descriptors that the process may open, so that
boxes have the rest."""
NAME = re.compile(r"[0-9a-f]{8,64}")
RETRY_S = 2

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Service:
    """The requests of one server."""

    def __init__(
        self,
        boxes: Boxes,
        images: Images,
        limits: Limits,
        *,
        image_mib: int,
        token: str | None,
        engine: ContainerEngine | None,
    ):
        """`limits`: the highest that a client may ask for; `image_mib`: MiB of an image. `engine`: has the images that
        the directory lacks."""
        self.boxes, self._images, self._limits, self._token = boxes, images, limits, token
        self._image_mib, self._engine = image_mib, engine
        self._upload = asyncio.Lock()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY)
        app.router.add_get("/v1/", self._state)
        app.router.add_get("/v1/images/{name}", self._image)
        app.router.add_put("/v1/images/{name}", self._send)
        box = "/v1/boxes/{box}"
        app.router.add_put(box, self._begin)
        app.router.add_delete(box, self._end)
        app.router.add_post(f"{box}/lease", self._lease)
        app.router.add_put(f"{box}/runs/{{run}}", self._start)
        app.router.add_get(f"{box}/runs/{{run}}", self._ended)
        app.router.add_delete(f"{box}/runs/{{run}}", self._stop)
        app.router.add_put(f"{box}/file", self._put)
        app.router.add_get(f"{box}/file", self._get)
        app.router.add_get(f"{box}/snapshot", self._snapshot)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not permitted(request.headers.get("Authorization", ""), self._token):
            return _refused(401, "box.token", "the token is wrong or missing", "Authorization")
        try:
            return await handler(request)
        except SlimxError as error:
            return _refused(400, error.code, str(error), error.about)
        except web.HTTPRequestEntityTooLarge:
            return _refused(413, "box.large", f"a request has {MAX_BODY} bytes at most", request.path)
        except TimeoutError:
            return _refused(408, "box.request", "a request was not whole in time", request.path)
        except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
            return _refused(400, "box.request", raised(error), request.path)
        except web.HTTPException:
            raise
        except Exception as error:
            return _refused(500, "box.lost", raised(error), request.path)

    async def _state(self, request: web.Request) -> web.Response:
        boxes = self.boxes
        counts = {"boxes": boxes.most, "held": len(boxes.held), "expired": boxes.expired, "left": boxes.left}
        return web.json_response({"protocol": PROTOCOL, "lease_s": boxes.lease_s, **counts})

    async def _image(self, request: web.Request) -> web.Response:
        source = self._source(request.match_info["name"])
        if isinstance(source, str) and self._engine is not None:
            source = source if await asyncio.to_thread(self._engine.has_image, source) else None
        return web.Response(status=404 if source is None else 200)

    async def _send(self, request: web.Request) -> web.Response:
        """Keep an archive that a client sends, if it has the digest that it is named by."""
        name, size = request.match_info["name"], _size(request)
        if not UPLOADED.fullmatch(name):
            raise ValueError("an archive is named sha256- and its digest")
        if not self._images.fits(size):
            return _refused(413, "box.large", f"archives have {self._images.uploads_mib} MiB at most", name)
        async with self._upload:
            digest, left = hashlib.sha256(), size
            with tempfile.NamedTemporaryFile(dir=self._images.uploads, prefix="sending-") as file:
                async with asyncio.timeout(UPLOAD_S):
                    async for piece in request.content.iter_chunked(2**18):
                        left -= len(piece)
                        digest.update(piece)
                        file.write(piece)
                if left != 0 or f"sha256-{digest.hexdigest()}" != name:
                    raise ValueError("the archive is not the one that it is named after")
                file.flush()
                self._images.make_room(size)
                with contextlib.suppress(FileExistsError):
                    os.link(file.name, self._images.uploads / name)
        return web.Response(status=201)

    async def _json(self, request: web.Request) -> Any:
        """The request's object, refused by its size before it is read."""
        if _size(request) > MAX_BODY:
            raise web.HTTPRequestEntityTooLarge(MAX_BODY, _size(request))
        async with asyncio.timeout(BODY_S):
            return json.loads(await request.read())  # in Unicode: Content-Type could name a codec that takes minutes

    async def _begin(self, request: web.Request) -> web.Response:
        name = _name(request, "box")
        asked = await self._json(request)
        limits = limits_within(dict(asked["limits"]), self._limits)
        if self.boxes.full and name not in self.boxes.held:
            return web.Response(status=503, headers={"Retry-After": str(RETRY_S)})
        source = self._source(str(asked["image"]))
        if source is None:
            return web.Response(status=404)
        await self.boxes.begin(name, source, limits)
        return web.json_response({"lease_s": self.boxes.lease_s}, status=201)

    async def _end(self, request: web.Request) -> web.Response:
        await self.boxes.end(_name(request, "box"))
        return web.Response(status=204)

    async def _lease(self, request: web.Request) -> web.Response:
        self.boxes.renew(self._held(request))
        return web.Response(status=204)

    async def _start(self, request: web.Request) -> web.Response:
        held, name, asked = self._held(request), _name(request, "run"), await self._json(request)
        command, stdin, cwd = asked["command"], asked["stdin"], asked["cwd"]
        if (
            not isinstance(command, list)
            or not command
            or not all(isinstance(each, str) for each in (*command, stdin, cwd))
        ):
            raise ValueError("a run has a command, a list of texts, and the texts stdin and cwd")
        check_run(command, stdin, cwd)

        def run(box: Box, stop: threading.Event) -> Ran:
            return box.run(command, stdin=stdin, cwd=cwd, stop=stop)

        self.boxes.start(held, name, run)
        return web.Response(status=202)

    async def _ended(self, request: web.Request) -> web.Response:
        held = self._held(request)
        run = held.runs.get(_name(request, "run"))
        if run is None:
            return web.Response(status=404)
        wait_s = min(MAX_WAIT, float(request.query.get("wait", 0.0)))
        await asyncio.wait({run.done}, timeout=max(0.0, wait_s))
        self.boxes.renew(held)
        return web.json_response(dataclasses.asdict(run.done.result())) if run.done.done() else web.Response(status=202)

    async def _stop(self, request: web.Request) -> web.Response:
        run = self._held(request).runs.get(_name(request, "run"))
        if run is not None:
            run.stop.set()
        return web.Response(status=204)

    async def _put(self, request: web.Request) -> web.Response:
        held, path = self._held(request), request.query["path"]
        if _size(request) > MAX_FILE:
            return _refused(413, "box.large", f"a file has {MAX_FILE} bytes at most", path)
        async with asyncio.timeout(BODY_S):
            content = await request.content.read()  # no more than Content-Length
        await self.boxes.call(held, lambda box: box.put(path, content))
        return web.Response(status=204)

    async def _get(self, request: web.Request) -> web.Response:
        held, path, most = self._held(request), request.query["path"], int(request.query["most"])
        if not 0 <= most <= MAX_FILE:
            return _refused(413, "box.large", f"a file has {MAX_FILE} bytes at most", path)
        content = await self.boxes.call(held, lambda box: box.get(path, most))
        return web.Response(body=content, content_type="application/octet-stream")

    async def _snapshot(self, request: web.Request) -> web.StreamResponse:
        held = self._held(request)
        place = await asyncio.to_thread(roots.hold, Path(tempfile.gettempdir()), private=True)
        archive = place.holder / "root.tar"

        def copy(box: Box) -> None:
            box.snapshot(place.path)
            with archive.open("wb") as written:
                roots.pack(place.path, written, (self._image_mib + self._limits.disk_mib) * MIB)

        try:
            await self.boxes.call(held, copy)
            answer = web.FileResponse(archive)
            await answer.prepare(request)
            await answer.write_eof()
            return answer
        finally:
            await asyncio.shield(asyncio.to_thread(place.remove))

    def _source(self, name: str) -> str | Path | None:
        found = self._images.find(name)
        return name if found is None and self._engine is not None and not UPLOADED.fullmatch(name) else found

    def _held(self, request: web.Request) -> Held:
        held = self.boxes.held.get(_name(request, "box"))
        if held is None or held.ending is not None:
            raise web.HTTPNotFound
        return held


def _name(request: web.Request, kind: str) -> str:
    name = request.match_info[kind]
    if not NAME.fullmatch(name):
        raise BoxRefusal(f"{name!r} is no name of a {kind}: hexadecimal digits", code="name", about=name)
    return name


def _size(request: web.Request) -> int:
    if request.content_length is None:
        raise ValueError("give Content-Length")
    return request.content_length


def _refused(status: int, code: str, error: str, about: str) -> web.Response:
    return web.json_response({"code": code, "error": error, "about": about}, status=status)


async def serve(
    arguments: argparse.Namespace, ready: Callable[[str], Any] = lambda url: print(url, flush=True)
) -> None:
    """Serve until SIGTERM or SIGINT, and end all boxes then."""
    token = os.environ[arguments.token_env] if arguments.token_env else None
    given = {name: getattr(arguments, name) for name in (*LIMITS, "image_mib")}
    if arguments.engine:
        given["engine"] = arguments.engine.split()
    if arguments.host_usr:
        given["host_usr"] = True
    options = BoxOptions.read(given | {"backend": arguments.backend}, "--")
    options.sweep()

    def make(source: str | Path, limits: Limits) -> Box:
        return msgspec.structs.replace(options, limits=limits).make(source)

    stop = asyncio.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(each, stop.set)
    with tempfile.TemporaryDirectory(prefix="slimx-uploads-") as uploads:
        os.chmod(uploads, 0o700)
        boxes = Boxes(make, most=arguments.boxes, lease_s=arguments.lease)
        images = Images(arguments.images, Path(uploads), arguments.uploads_mib)
        engine = ContainerEngine.find(options.engine) if arguments.backend == "container" else None
        service = Service(boxes, images, options.limits, image_mib=options.image_mib, token=token, engine=engine)
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        connections = Connections(most=min(CONNECTIONS, descriptors // 2), idle=IDLE_S)
        try:
            server = await connections.listen(service.app(), arguments.host, arguments.port)
        except OSError as error:
            raise SlimxError(
                f"--host, --port: nobody can listen at {address(arguments.host, arguments.port)} ({error.strerror}); "
                "choose another",
            ) from None
        watch = asyncio.create_task(boxes.watch())
        try:
            ready(f"http://{address(arguments.host, server.port)}")
            await stop.wait()
        finally:
            watch.cancel()
            await server.close()
            await boxes.close()


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m slimx.extras.boxes.serve", description="Serve boxes.")
    parser.add_argument("--backend", choices=("bubblewrap", "container"), default="bubblewrap")
    parser.add_argument("--engine", help="words that start the container engine, such as 'podman --runtime runc'")
    parser.add_argument("--images", type=Path, help="directory of archives and roots that clients may name")
    parser.add_argument("--host-usr", action="store_true", help="boxes read this machine's /usr")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8600)
    parser.add_argument("--token-env", help="variable that holds the token; needed on other addresses than loopback")
    parser.add_argument("--boxes", type=int, default=16, help="boxes at once")
    parser.add_argument("--lease", type=float, default=120.0, help="seconds after which a silent client's box ends")
    parser.add_argument("--image-mib", type=int, default=4096)
    parser.add_argument("--uploads-mib", type=int, default=16384, help="MiB of all archives that clients have sent")
    for each in dataclasses.fields(Limits):
        kind = float if each.name == "seconds" else int
        parser.add_argument(
            f"--{each.name.replace('_', '-')}",
            type=kind,
            default=each.default,
            help="the most that clients may ask for",
        )
    arguments = parser.parse_args(words)
    token_of(parser, arguments)
    if arguments.images is not None and not arguments.images.is_dir():
        parser.error(f"--images: there is no directory {arguments.images}")
    if arguments.boxes < 1 or not arguments.lease > 0:
        parser.error("--boxes and --lease are above 0")
    try:
        asyncio.run(serve(arguments))
    except SlimxError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
