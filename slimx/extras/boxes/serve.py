"""The reference server of remote sandboxes, over HTTP.

    python -m slimx.extras.boxes.serve --backend bubblewrap --images images/ --host 0.0.0.0 --token-env TOKEN

    GET    /v1/                         {"protocol": 1, "boxes", "held", "expired", "left", "lease_s"}
    GET    /v1/images/NAME              200 or 404          PUT  /v1/images/sha256-HEX    an archive
    PUT    /v1/boxes/ID                 {"image", "limits"} -> {"lease_s"}; 503 with Retry-After if none is free
    POST   /v1/boxes/ID/lease           renews the lease, as does every other call
    PUT    /v1/boxes/ID/runs/RUN        {"command", "stdin", "cwd"}
    GET    /v1/boxes/ID/runs/RUN?wait=S 200 with its result, or 202 after S seconds      DELETE: stop it
    PUT    /v1/boxes/ID/file?path=P     GET .../file?path=P&most=BYTES                   GET .../snapshot
    DELETE /v1/boxes/ID

Clients name sandboxes and runs by random hexadecimal digits. An error is {"code", "error", "about"} with status 400,
401, 408, 413 or 500; the status is 404 for a sandbox that has ended.
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

import msgspec
from aiohttp import web

from slimx.errors import SlimxError, raised
from slimx.extras.boxes import rootfs
from slimx.extras.boxes.choice import LIMITS, BoxOptions
from slimx.extras.boxes.engines import ContainerEngine
from slimx.extras.boxes.leases import UPLOADED, Boxes, Images, Lease, limits_within
from slimx.extras.boxes.programs.enclosure import MIB, ProgramResult
from slimx.extras.boxes.programs.watch import Limits
from slimx.extras.boxes.protocol import Box, BoxRefusal, check_run
from slimx.extras.boxes.remote import MAX_FILE, PROTOCOL
from slimx.extras.http.access import permitted, token_of
from slimx.extras.http.connections import Connections
from slimx.json_types import Json
from slimx.runtime.ports import address

MAX_BODY = 2 * MIB
"""Maximum size of a request body that is not a file or an archive, in bytes."""
MAX_WAIT = 30.0
"""Maximum time in seconds for which a poll waits for a program to end."""
BODY_S = 60.0
"""Deadline in seconds for receiving a request body."""
UPLOAD_S = 600.0
"""Deadline in seconds for receiving an archive."""
IDLE_S = 20.0
"""Seconds after which a connection without complete request headers is closed."""
CONNECTIONS = 4096
"""Maximum number of open connections. At most half of the process's file descriptors are used, because sandboxes need
the others."""
NAME = re.compile(r"[0-9a-f]{8,64}")
RETRY_S = 2
"""Seconds that a client should wait before it retries, as sent in the header Retry-After."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Service:
    """HTTP handlers of a sandbox server."""

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
        """Serves the sandboxes in `boxes`.

        `limits`: maximum limits that clients may request. `image_mib`: maximum size of an image in MiB. `token`: token
        that clients must send; None if none is required. `engine`: container engine, whose images clients may name in
        addition to `images`.
        """
        self.boxes = boxes
        self._images = images
        self._limits = limits
        self._token = token
        self._image_mib = image_mib
        self._engine = engine
        self._upload = asyncio.Lock()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY)
        app.router.add_get("/v1/", self._state)
        app.router.add_get("/v1/images/{name}", self._image)
        app.router.add_put("/v1/images/{name}", self._receive)
        box = "/v1/boxes/{box}"
        app.router.add_put(box, self._begin)
        app.router.add_delete(box, self._end)
        app.router.add_post(f"{box}/lease", self._renew)
        app.router.add_put(f"{box}/runs/{{run}}", self._start)
        app.router.add_get(f"{box}/runs/{{run}}", self._result)
        app.router.add_delete(f"{box}/runs/{{run}}", self._stop)
        app.router.add_put(f"{box}/file", self._put)
        app.router.add_get(f"{box}/file", self._get)
        app.router.add_get(f"{box}/snapshot", self._snapshot)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not permitted(request.headers.get("Authorization", ""), self._token):
            return _refused(401, "box.token", "the server's token is wrong or missing; set token_env", "Authorization")
        try:
            return await handler(request)
        except SlimxError as error:
            return _refused(400, error.code, str(error), error.about)
        except web.HTTPRequestEntityTooLarge:
            return _refused(413, "box.large", f"the request exceeds {MAX_BODY} bytes", request.path)
        except TimeoutError:
            return _refused(408, "box.request", "the body did not arrive in time; send it again", request.path)
        except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
            return _refused(400, "box.request", raised(error), request.path)
        except web.HTTPException:
            raise
        except Exception as error:
            return _refused(500, "box.lost", raised(error), request.path)

    async def _state(self, request: web.Request) -> web.Response:
        boxes = self.boxes
        counts = {"boxes": boxes.most, "held": len(boxes.leases), "expired": boxes.expired, "left": boxes.left}
        return web.json_response({"protocol": PROTOCOL, "lease_s": boxes.lease_s, **counts})

    async def _image(self, request: web.Request) -> web.Response:
        source = self._source(request.match_info["name"])
        exists = source is not None
        if isinstance(source, str) and self._engine is not None:
            exists = await asyncio.to_thread(self._engine.has_image, source)
        return web.Response(status=200 if exists else 404)

    async def _receive(self, request: web.Request) -> web.Response:
        """Stores an uploaded archive if its digest matches its name."""
        name = request.match_info["name"]
        size = _size(request)
        if not UPLOADED.fullmatch(name):
            raise ValueError(f"the name of an archive must be sha256- followed by its digest, not {name!r}")
        if not self._images.fits(size):
            return _refused(
                413, "box.large", f"the archive exceeds {self._images.uploads_mib} MiB; raise --uploads-mib", name
            )
        async with self._upload:
            digest = hashlib.sha256()
            left = size
            with tempfile.NamedTemporaryFile(dir=self._images.uploads, prefix="sending-") as file:
                async with asyncio.timeout(UPLOAD_S):
                    async for piece in request.content.iter_chunked(2**18):
                        left -= len(piece)
                        digest.update(piece)
                        file.write(piece)
                if left != 0 or f"sha256-{digest.hexdigest()}" != name:
                    raise ValueError("the archive does not match its Content-Length or its name; upload it again")
                file.flush()
                self._images.make_room(size)
                with contextlib.suppress(FileExistsError):
                    os.link(file.name, self._images.uploads / name)
        return web.Response(status=201)

    async def _json(self, request: web.Request) -> Json:
        """Reads the JSON object of a request, after checking its size."""
        if _size(request) > MAX_BODY:
            raise web.HTTPRequestEntityTooLarge(MAX_BODY, _size(request))
        async with asyncio.timeout(BODY_S):
            return json.loads(await request.read())  # always UTF-8, because Content-Type could name a slow codec

    async def _begin(self, request: web.Request) -> web.Response:
        name = _name(request, "box")
        body = await self._json(request)
        limits = limits_within(dict(body["limits"]), self._limits)
        if self.boxes.full and name not in self.boxes.leases:
            return web.Response(status=503, headers={"Retry-After": str(RETRY_S)})
        source = self._source(str(body["image"]))
        if source is None:
            return web.Response(status=404)
        await self.boxes.begin(name, source, limits)
        return web.json_response({"lease_s": self.boxes.lease_s}, status=201)

    async def _end(self, request: web.Request) -> web.Response:
        await self.boxes.end(_name(request, "box"))
        return web.Response(status=204)

    async def _renew(self, request: web.Request) -> web.Response:
        self.boxes.renew(self._lease(request))
        return web.Response(status=204)

    async def _start(self, request: web.Request) -> web.Response:
        lease = self._lease(request)
        name = _name(request, "run")
        body = await self._json(request)
        command = body["command"]
        stdin = body["stdin"]
        cwd = body["cwd"]
        if (
            not isinstance(command, list)
            or not command
            or not all(isinstance(word, str) for word in (*command, stdin, cwd))
        ):
            raise ValueError("the field command must be a non-empty list of strings, and stdin and cwd must be strings")
        check_run(command, stdin, cwd)

        def run(box: Box, stop: threading.Event) -> ProgramResult:
            return box.run(command, stdin=stdin, cwd=cwd, stop=stop)

        self.boxes.start(lease, name, run)
        return web.Response(status=202)

    async def _result(self, request: web.Request) -> web.Response:
        lease = self._lease(request)
        run = lease.runs.get(_name(request, "run"))
        if run is None:
            return web.Response(status=404)
        wait_s = min(MAX_WAIT, float(request.query.get("wait", 0.0)))
        await asyncio.wait({run.done}, timeout=max(0.0, wait_s))
        self.boxes.renew(lease)
        if not run.done.done():
            return web.Response(status=202)
        return web.json_response(dataclasses.asdict(run.done.result()))

    async def _stop(self, request: web.Request) -> web.Response:
        run = self._lease(request).runs.get(_name(request, "run"))
        if run is not None:
            run.stop.set()
        return web.Response(status=204)

    async def _put(self, request: web.Request) -> web.Response:
        lease = self._lease(request)
        path = request.query["path"]
        if _size(request) > MAX_FILE:
            return _refused(413, "box.large", f"{path} exceeds {MAX_FILE} bytes; split the file", path)
        async with asyncio.timeout(BODY_S):
            content = await request.content.read()  # at most Content-Length bytes
        await self.boxes.call(lease, lambda box: box.put(path, content))
        return web.Response(status=204)

    async def _get(self, request: web.Request) -> web.Response:
        lease = self._lease(request)
        path = request.query["path"]
        most = int(request.query["most"])
        if not 0 <= most <= MAX_FILE:
            return _refused(413, "box.large", f"the parameter most={most} is not from 0 to {MAX_FILE}", path)
        content = await self.boxes.call(lease, lambda box: box.get(path, most))
        return web.Response(body=content, content_type="application/octet-stream")

    async def _snapshot(self, request: web.Request) -> web.StreamResponse:
        lease = self._lease(request)
        root = await asyncio.to_thread(rootfs.allocate, Path(tempfile.gettempdir()), private=True)
        archive = root.holder / "root.tar"

        def copy(box: Box) -> None:
            box.snapshot(root.path)
            with archive.open("wb") as written:
                rootfs.pack(root.path, written, (self._image_mib + self._limits.disk_mib) * MIB)

        try:
            await self.boxes.call(lease, copy)
            response = web.FileResponse(archive)
            await response.prepare(request)
            await response.write_eof()
            return response
        finally:
            await asyncio.shield(asyncio.to_thread(root.remove))

    def _source(self, name: str) -> str | Path | None:
        path = self._images.find(name)
        if path is None and self._engine is not None and not UPLOADED.fullmatch(name):
            return name
        return path

    def _lease(self, request: web.Request) -> Lease:
        lease = self.boxes.leases.get(_name(request, "box"))
        if lease is None or lease.ending is not None:
            raise web.HTTPNotFound
        return lease


def _name(request: web.Request, kind: str) -> str:
    name = request.match_info[kind]
    if not NAME.fullmatch(name):
        raise BoxRefusal(
            f"{name!r} is not a valid name of a {kind}; use 8 to 64 hexadecimal digits", code="name", about=name
        )
    return name


def _size(request: web.Request) -> int:
    if request.content_length is None:
        raise ValueError("the request has no Content-Length")
    return request.content_length


def _refused(status: int, code: str, error: str, about: str) -> web.Response:
    return web.json_response({"code": code, "error": error, "about": about}, status=status)


async def serve(
    arguments: argparse.Namespace, ready: Callable[[str], object] = lambda url: print(url, flush=True)
) -> None:
    """Serves until SIGTERM or SIGINT, then removes all sandboxes. `ready`: function that is called with the server's
    URL once the server accepts connections."""
    token = os.environ[arguments.token_env] if arguments.token_env else None
    options = _options(arguments)
    options.sweep()

    def make(source: str | Path, limits: Limits) -> Box:
        return msgspec.structs.replace(options, limits=limits).make(source)

    stop = asyncio.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signal_number, stop.set)
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
                f"--host, --port: slimx cannot listen on {address(arguments.host, arguments.port)} "
                f"({error.strerror}); choose another address",
            ) from None
        watch = asyncio.create_task(boxes.watch())
        try:
            ready(f"http://{address(arguments.host, server.port)}")
            await stop.wait()
        finally:
            watch.cancel()
            await server.close()
            await boxes.close()


def _options(arguments: argparse.Namespace) -> BoxOptions:
    fields: dict[str, object] = {name: getattr(arguments, name) for name in (*LIMITS, "image_mib")}
    fields["backend"] = arguments.backend
    if arguments.engine:
        fields["engine"] = arguments.engine.split()
    if arguments.host_usr:
        fields["host_usr"] = True
    return BoxOptions.read(fields, "--")


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m slimx.extras.boxes.serve", description="Serves sandboxes.")
    parser.add_argument("--backend", choices=("bubblewrap", "container"), default="bubblewrap")
    parser.add_argument(
        "--engine",
        help="command of the engine, e.g. 'podman --runtime runc'; default: podman or docker",
    )
    parser.add_argument("--images", type=Path, help="directory of archives and root directories that clients may name")
    parser.add_argument("--host-usr", action="store_true", help="mount this machine's /usr read-only in sandboxes")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8600)
    parser.add_argument(
        "--token-env",
        help="variable with the clients' token; required unless --host is a loopback address",
    )
    parser.add_argument("--boxes", type=int, default=16, help="maximum number of sandboxes at once")
    parser.add_argument("--lease", type=float, default=120.0, help="seconds until a silent client's sandbox is removed")
    parser.add_argument("--image-mib", type=int, default=4096, help="maximum size of an image, in MiB")
    parser.add_argument("--uploads-mib", type=int, default=16384, help="maximum size of all uploads together, in MiB")
    for limit in dataclasses.fields(Limits):
        kind = float if limit.name == "seconds" else int
        parser.add_argument(
            f"--{limit.name.replace('_', '-')}",
            type=kind,
            default=limit.default,
            help=f"maximum of the limit {limit.name} that clients may request",
        )
    arguments = parser.parse_args(words)
    token_of(parser, arguments)
    if arguments.images is not None and not arguments.images.is_dir():
        parser.error(f"--images: {arguments.images} is not a directory; give the directory of the images")
    if arguments.boxes < 1 or not arguments.lease > 0:
        parser.error("--boxes or --lease is not above 0; set both to numbers above 0")
    try:
        asyncio.run(serve(arguments))
    except SlimxError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
