"""A rollout's sandbox on another machine: the client of the server in `serve`.

The client chooses the names of sandboxes, images and runs of programs, which makes calls idempotent: it retries a call
whose response was lost. The server removes a sandbox whose client sends nothing for the duration of its lease.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import secrets
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import quote

import aiohttp

from slimx.extras.boxes import rootfs
from slimx.extras.boxes.programs.enclosure import MIB, ProgramResult
from slimx.extras.boxes.programs.watch import Limits
from slimx.extras.boxes.protocol import Box, BoxBusy, BoxLost, BoxRefusal, Either, names_of, too_large
from slimx.extras.http.blocking import HttpResponse, fetch
from slimx.json_types import Json

PROTOCOL = 1
CONNECT_S = 10.0
"""Maximum time in seconds for connecting to the server."""
ANSWER_S = 60.0
"""Seconds without progress after which a request or a response times out."""
MAKE_S = 600.0
"""Timeout, in seconds without progress, of requests for which the server copies a root file system."""
SEND_S = 1800.0
"""Seconds without progress after which an upload times out, including the wait for other uploads to finish."""
SEND_TRIES = 3
"""Maximum number of times that an archive is uploaded for one sandbox, because the server may remove the archive before
its use to make room for other uploads."""
END_S = 600.0
"""Seconds that the server may take in addition to a program's time limit, to start it and to kill its processes."""
POLL_S = 1.0
"""Maximum time in seconds for which the server holds a poll for the end of a program before it responds."""
MAX_FILE = 64 * MIB
"""Maximum size of a file that is read or written, in bytes."""
MAX_JSON = 16 * MIB
"""Maximum size of a response that is not a file, in bytes."""


@dataclass(frozen=True, slots=True)
class RemoteServer:
    """Connection settings of a sandbox server."""

    url: str
    """Base URL of the server, without a path."""
    token: str | None = None
    retry_s: float = 30.0
    """Seconds during which a call whose response was lost is retried."""

    def request(
        self,
        method: str,
        path: str,
        *,
        body: Json | None = None,
        data: bytes | IO[bytes] | None = None,
        most: int = MAX_JSON,
        seconds: float = ANSWER_S,
        retry: bool = True,
        to: IO[bytes] | None = None,
    ) -> HttpResponse:
        """Sends a request and returns the response, with up to `most` bytes of content.

        `path`: path after /v1/. `seconds`: seconds without progress after which the request times out. `retry`: True to
        retry if the response was lost. `to`: file to which the content is written; None to return it in the response.
        Raises BoxLost if there is no response, BoxRefusal if the server refuses the request.
        """
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        until = time.monotonic()
        if retry:
            until += self.retry_s
        while True:
            try:
                if to is not None:
                    to.seek(0)
                    to.truncate()
                response = fetch(
                    method,
                    f"{self.url}/v1/{path}",
                    json=body,
                    data=data,
                    headers=headers,
                    connect_s=CONNECT_S,
                    read_s=seconds,
                    most=most,
                    to=to,
                )
            except (aiohttp.ClientError, TimeoutError) as error:
                if time.monotonic() > until:
                    raise BoxLost(
                        f"the sandbox server at {self.url} does not answer {method} {path} ({type(error).__name__}: "
                        f"{str(error)[:300]}); start the server, or set the option `url` to a running server's URL",
                        about=self.url,
                    ) from error
                time.sleep(min(1.0, self.retry_s / 10))
                continue
            self._check(response, path)
            return response

    def check(self) -> None:
        """Raises BoxLost if the server is down or has another protocol version, BoxRefusal if it refuses the token."""
        response = self.request("GET", "", retry=False)
        try:
            version = json.loads(response.content)["protocol"]
        except (ValueError, KeyError, TypeError):
            version = None
        if version != PROTOCOL:
            raise BoxLost(
                f"{self.url} is not a sandbox server with protocol version {PROTOCOL}; set the option `url` to "
                "such a server, or install this version of slimx there",
                about=self.url,
            )

    def check_image(self, name: str) -> None:
        """Raises BoxRefusal if the server does not have the image `name`."""
        if not self.has_image(name):
            raise BoxRefusal(
                f"the sandbox server at {self.url} has no image {name}; add {name} to the directory "
                "that the server's option --images names, or to the images of the server's container engine",
                code="source",
                about=name,
            )

    def has_image(self, name: str) -> bool:
        return self.request("GET", f"images/{quote(name, safe='')}").status == 200

    def _check(self, response: HttpResponse, path: str) -> None:
        """Raises BoxRefusal for an error response that rejects the request, BoxLost for any other error response.
        `path`: path of the request, for the message."""
        if response.status in (200, 201, 202, 204, 404, 503):
            return
        try:
            message = json.loads(response.content)
            code = str(message["code"])
            text = str(message["error"])
            about = str(message["about"])
        except (ValueError, KeyError, TypeError):
            code = "box.lost"
            text = response.content[:300].decode(errors="replace")
            about = ""
        text = f"the sandbox server at {self.url}: {text}"
        if not code.startswith("box.") or code == "box.lost":
            raise BoxLost(f"{text} (status {response.status} of {path})", about=self.url)
        raise BoxRefusal(text, code=code.removeprefix("box."), about=about)


class RemoteBox(Box):
    """`Box` on a sandbox server, which starts from an image on the server or from a copy of a path on this machine."""

    def __init__(
        self,
        source: str | Path,
        limits: Limits | None = None,
        *,
        server: RemoteServer,
        patience: float = 60.0,
        image_mib: int = 4096,
    ):
        """Requests the sandbox from the server.

        `source`: name of an image, or a path. `patience`: seconds to wait while the server has no free sandbox.
        `image_mib`: maximum size of a directory in MiB. Raises BoxBusy if no sandbox becomes free, BoxLost if the
        server fails, BoxRefusal for an unusable source.
        """
        super().__init__(limits)
        self._server = server
        self._path = f"boxes/{secrets.token_hex(16)}"
        self._ended = False
        try:
            with _archive(source, image_mib) as (name, archive):
                lease_s = self._begin(name, archive, patience)
        except BaseException:
            with suppress(BoxLost, BoxRefusal):  # the first error explains the failure
                self.end()
            raise
        threading.Thread(target=self._renew, args=(lease_s / 3,), name="slimx-lease", daemon=True).start()

    def run(
        self, command: Sequence[str], *, stdin: str = "", cwd: str = "/", stop: threading.Event | None = None
    ) -> ProgramResult:
        """Runs a program, as `Box.run` describes: starts it once and polls until it has ended."""
        with self._living():
            run = f"{self._path}/runs/{secrets.token_hex(8)}"
            stopping = Either(self._closing, stop)
            self._request("PUT", run, body={"command": list(command), "stdin": stdin, "cwd": cwd})
            until = time.monotonic() + self.limits.seconds + END_S
            stopped = False
            while time.monotonic() < until:
                if stopping.is_set() and not stopped:
                    self._request("DELETE", run)
                    stopped = True
                response = self._request("GET", f"{run}?wait={POLL_S}")
                if response.status == 200:
                    return ProgramResult(**json.loads(response.content))
            raise BoxLost(
                f"the sandbox server at {self._server.url} did not end a program within {END_S:g} s after its "
                "time limit; find the cause in the server's output",
                about=self._server.url,
            )

    def put(self, path: str, content: bytes) -> None:
        names_of(path)
        with self._living():
            self._request("PUT", f"{self._path}/file?path={quote(path, safe='')}", data=content)

    def get(self, path: str, most: int) -> bytes:
        names_of(path)
        with self._living():
            query = f"path={quote(path, safe='')}&most={most}"
            content = self._request("GET", f"{self._path}/file?{query}", most=most + 1).content
        if len(content) > most:
            raise too_large(path, f"more than {most}", most)
        return content

    def snapshot(self, to: Path) -> None:
        with self._living(), rootfs.unpacked(to) as archive, archive.open("w+b") as file:
            self._request("GET", f"{self._path}/snapshot", most=2**40, seconds=MAKE_S, to=file)

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._server.request("DELETE", self._path)

    def _begin(self, name: str, archive: IO[bytes] | None, patience: float) -> float:
        """Requests a sandbox repeatedly until the server has a free one, and returns the duration of the sandbox's
        lease in seconds. `name`: name of the image. `archive`: archive to upload if the server does not have the
        image."""
        body = {"image": name, "limits": dataclasses.asdict(self.limits)}
        if archive is not None and not self._server.has_image(name):
            self._send(name, archive)
        sent = 1
        until = time.monotonic() + patience
        while True:
            response = self._server.request("PUT", self._path, body=body, seconds=MAKE_S)
            if response.status in (200, 201):
                return float(json.loads(response.content)["lease_s"])
            if (
                response.status == 404 and archive is not None and sent < SEND_TRIES
            ):  # the server removed it for other uploads
                self._send(name, archive)
                sent += 1
                until = time.monotonic() + patience
                continue
            if response.status == 404:
                raise BoxRefusal(
                    f"the sandbox server at {self._server.url} has no image {name}; add {name} to the directory "
                    "that the server's option --images names, or to the images of the server's container engine",
                    code="source",
                    about=name,
                )
            if time.monotonic() > until:
                raise BoxBusy(
                    f"the sandbox server at {self._server.url} has no free sandbox; raise its option --boxes, or "
                    "lower schedule.max_staleness or rollout.group_size",
                    about=self._server.url,
                )
            try:
                wait_s = float(response.headers.get("Retry-After", 1.0))
            except ValueError:
                wait_s = 1.0
            time.sleep(max(0.1, min(wait_s, 10.0)))

    def _send(self, name: str, archive: IO[bytes]) -> None:
        self._server.request("PUT", f"images/{name}", data=archive, seconds=SEND_S)

    def _request(self, method: str, path: str, **options: Any) -> HttpResponse:
        response = self._server.request(method, path, **options)
        if response.status in (404, 503):
            raise BoxLost(
                f"the sandbox server at {self._server.url} no longer has this sandbox, because its lease has expired "
                "or the server was restarted; create another sandbox",
                about=self._server.url,
            )
        return response

    def _renew(self, seconds: float) -> None:
        while not self._closing.wait(seconds):
            try:
                self._server.request("POST", f"{self._path}/lease", retry=False)
            except (BoxLost, BoxRefusal):
                continue  # the rollout's next call raises the error


@contextmanager
def _archive(source: str | Path, image_mib: int) -> Iterator[tuple[str, IO[bytes] | None]]:
    """Yields the name of an image on the server, and the archive to upload if the server does not have it."""
    if isinstance(source, str):
        yield source, None
    elif not source.exists():
        raise rootfs.no_source(source)
    elif source.is_dir():
        if rootfs.used(source, most=image_mib * MIB) > image_mib * MIB:
            raise rootfs.too_large(source, image_mib * MIB)
        with tempfile.TemporaryFile() as archive:
            rootfs.pack(source, archive, image_mib * MIB, _undated)
            yield _named(archive), archive
    else:
        status = source.stat()
        with source.open("rb") as archive:
            yield _name_of(source.resolve(), status.st_size, status.st_mtime_ns), archive


def _undated(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Sets the modification times of directories to 0 and rounds those of files down to whole seconds, so that equal
    directories yield equal archives."""
    return member.replace(mtime=0 if member.isdir() else int(member.mtime), deep=False)


@functools.lru_cache(1024)
def _name_of(path: Path, size: int, changed: int) -> str:
    with path.open("rb") as archive:
        return _named(archive)


def _named(archive: IO[bytes]) -> str:
    archive.seek(0, os.SEEK_SET)
    digest = hashlib.file_digest(
        cast(BufferedReader, archive), "sha256"
    )  # typeshed declares temporary files as IO[bytes]
    return f"sha256-{digest.hexdigest()}"
