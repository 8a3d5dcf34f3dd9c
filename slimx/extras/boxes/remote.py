"""A box on another machine: the client of the service in `serve`.

Every call names what it asks for (box, run, image) itself, so that one whose answer was lost is asked again without
being done twice. A box whose client sends nothing for the length of its lease is ended by the server.
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
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import requests

from slimx.extras.boxes import roots
from slimx.extras.boxes.programs.enclosure import MIB, Ran
from slimx.extras.boxes.programs.watch import Limits
from slimx.extras.boxes.protocol import Box, BoxBusy, BoxLost, BoxRefusal, Either, names_of, too_large

PROTOCOL = 1
CONNECT_S, ANSWER_S, MAKE_S = 10.0, 60.0, 600.0
"""Seconds to connect, for an answer, and for one that copies a root."""
SEND_S, SEND_TRIES = 1800.0, 3
"""Seconds for the answer to an archive, which waits for those of others, and times that it is sent."""
END_S = 600.0
"""Seconds that the server may need besides those of a program: to start it, and to end all that it has left."""
POLL_S = 1.0
"""Seconds for which the server holds the question whether a program has ended."""
MAX_FILE = 64 * MIB
"""Bytes of one file that goes in or out."""
MAX_REFUSAL = 2**16
"""Bytes of an answer that says what has gone wrong."""
MAX_JSON = 16 * MIB
"""Bytes of an answer that is no file."""


@dataclass(frozen=True, slots=True)
class RemoteServer:
    """A server of boxes."""

    url: str
    """Without a path behind it."""
    token: str | None = None
    again_s: float = 30.0
    """Seconds for which a call whose answer was lost is asked again."""

    def ask(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        data: bytes | IO[bytes] | None = None,
        most: int = MAX_JSON,
        seconds: float = ANSWER_S,
        again: bool = True,
        to: IO[bytes] | None = None,
    ) -> tuple[int, bytes, dict[str, str]]:
        """Status, content of up to `most` bytes and headers of an answer; the content goes to the file `to` instead.
        Raises BoxLost where none comes, BoxRefusal for what the server refuses."""
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        until = time.monotonic() + self.again_s * again
        while True:
            try:
                if data is not None and not isinstance(data, bytes):
                    data.seek(0)
                if to is not None:
                    to.seek(0)
                    to.truncate()
                with closing(
                    requests.request(
                        method,
                        f"{self.url}/v1/{path}",
                        json=body,
                        data=data,
                        headers=headers,
                        timeout=(CONNECT_S, seconds),
                        stream=True,
                        allow_redirects=False,
                    )
                ) as answer:
                    content = _read(answer, most, to) if answer.status_code == 200 else _read(answer, MAX_REFUSAL, None)
                    return self._checked(answer.status_code, content, path), content, dict(answer.headers)
            except requests.RequestException as error:
                if time.monotonic() > until:
                    raise BoxLost(
                        f"the server of boxes at {self.url} does not answer {method} {path} ({type(error).__name__}: "
                        f"{str(error)[:300]})",
                        about=self.url,
                    ) from error
                time.sleep(min(1.0, self.again_s / 10))

    def check(self) -> None:
        """Refuse a server that is not there, speaks another protocol, or refuses the token (BoxLost, BoxRefusal)."""
        _, content, _ = self.ask("GET", "", again=False)
        try:
            spoken = json.loads(content)["protocol"]
        except (ValueError, KeyError, TypeError):
            spoken = None
        if spoken != PROTOCOL:
            raise BoxLost(f"what answers at {self.url} is no server of boxes of protocol {PROTOCOL}", about=self.url)

    def check_image(self, name: str) -> None:
        """Refuse an image that the server does not have (BoxRefusal)."""
        if not self.has_image(name):
            raise BoxRefusal(f"the server of boxes at {self.url} has no image {name}", code="source", about=name)

    def has_image(self, name: str) -> bool:
        return self.ask("GET", f"images/{requests.utils.quote(name, safe='')}")[0] == 200

    def _checked(self, status: int, content: bytes, path: str) -> int:
        """The status. Raises BoxRefusal or BoxLost for what the server says has gone wrong."""
        if status in (200, 201, 202, 204, 404, 503):
            return status
        try:
            said = json.loads(content)
            code, text, about = str(said["code"]), str(said["error"]), str(said["about"])
        except (ValueError, KeyError, TypeError):
            code, text, about = "box.lost", content[:300].decode(errors="replace"), ""
        text = f"the server of boxes at {self.url}: {text}"
        if not code.startswith("box.") or code == "box.lost":
            raise BoxLost(f"{text} (status {status} of {path})", about=self.url)
        raise BoxRefusal(text, code=code.removeprefix("box."), about=about)


class RemoteBox(Box):
    """A `Box` of a server, which begins as an image that the server has, or as a copy of a path of this machine."""

    def __init__(
        self,
        source: str | Path,
        limits: Limits | None = None,
        *,
        server: RemoteServer,
        patience: float = 60.0,
        image_mib: int = 4096,
    ):
        """`patience`: seconds to wait while the server has no box to give. `image_mib`: of an archive that is made of a
        directory. Raises BoxBusy, BoxLost, BoxRefusal."""
        super().__init__(limits)
        self._server = server
        self._path = f"boxes/{secrets.token_hex(16)}"
        self._ended = False
        try:
            with _archive(source, image_mib) as (name, archive):
                lease_s = self._begin(name, archive, patience)
        except BaseException:
            with suppress(BoxLost, BoxRefusal):  # the first error says more
                self.end()
            raise
        threading.Thread(target=self._renew, args=(lease_s / 3,), name="slimx-lease", daemon=True).start()

    def run(
        self, command: Sequence[str], *, stdin: str = "", cwd: str = "/", stop: threading.Event | None = None
    ) -> Ran:
        """Run a program, as `Box.run` says: it is started once, and asked for until it has ended."""
        with self._living():
            run, told = f"{self._path}/runs/{secrets.token_hex(8)}", Either(self._given_up, stop)
            body = {"command": list(command), "stdin": stdin, "cwd": cwd}
            self._ask("PUT", run, body=body)
            until, stopped = time.monotonic() + self.limits.seconds + END_S, False
            while time.monotonic() < until:
                if told.is_set() and not stopped:
                    self._ask("DELETE", run)
                    stopped = True
                status, content, _ = self._ask("GET", f"{run}?wait={POLL_S}")
                if status == 200:
                    return Ran(**json.loads(content))
            raise BoxLost(
                f"the server of boxes at {self._server.url} has not ended a program {END_S:g} s after its limit",
                about=self._server.url,
            )

    def put(self, path: str, content: bytes) -> None:
        names_of(path)
        with self._living():
            self._ask("PUT", f"{self._path}/file?path={requests.utils.quote(path, safe='')}", data=content)

    def get(self, path: str, most: int) -> bytes:
        names_of(path)
        with self._living():
            asked = f"{self._path}/file?path={requests.utils.quote(path, safe='')}&most={most}"
            content = self._ask("GET", asked, most=most + 1)[1]
        if len(content) > most:
            raise too_large(path, f"more than {most}", most)
        return content

    def snapshot(self, to: Path) -> None:
        with self._living(), roots.unpacked(to) as archive, archive.open("w+b") as file:
            self._ask("GET", f"{self._path}/snapshot", most=2**40, seconds=MAKE_S, to=file)

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._server.ask("DELETE", self._path)

    def _begin(self, name: str, archive: IO[bytes] | None, patience: float) -> float:
        """Ask for the box until there is one; seconds of its lease."""
        body = {"image": name, "limits": dataclasses.asdict(self.limits)}
        if archive is not None and not self._server.has_image(name):
            self._send(name, archive)
        sent, until = 1, time.monotonic() + patience
        while True:
            status, content, headers = self._server.ask("PUT", self._path, body=body, seconds=MAKE_S)
            if status in (200, 201):
                return float(json.loads(content)["lease_s"])
            if status == 404 and archive is not None and sent < SEND_TRIES:  # it has made room for others
                self._send(name, archive)
                sent, until = sent + 1, time.monotonic() + patience
                continue
            if status == 404:
                raise BoxRefusal(
                    f"the server of boxes at {self._server.url} has no image {name}", code="source", about=name
                )
            if time.monotonic() > until:
                raise BoxBusy(
                    f"the server of boxes at {self._server.url} has no box to give; start more of them, or lower "
                    "schedule.max_staleness or rollout.group_size",
                    about=self._server.url,
                )
            try:
                wait_s = float(headers.get("Retry-After", 1.0))
            except ValueError:
                wait_s = 1.0
            time.sleep(max(0.1, min(wait_s, 10.0)))

    def _send(self, name: str, archive: IO[bytes]) -> None:
        self._server.ask("PUT", f"images/{name}", data=archive, seconds=SEND_S)

    def _ask(self, method: str, path: str, **options: Any) -> tuple[int, bytes, dict[str, str]]:
        answer = self._server.ask(method, path, **options)
        if answer[0] in (404, 503):
            raise BoxLost(
                f"the server of boxes at {self._server.url} has this box no more: its lease has run out, or the server "
                "was started again",
                about=self._server.url,
            )
        return answer

    def _renew(self, seconds: float) -> None:
        while not self._given_up.wait(seconds):
            try:
                self._server.ask("POST", f"{self._path}/lease", again=False)
            except (BoxLost, BoxRefusal):
                continue  # the next call of the rollout says so


def _read(answer: requests.Response, most: int, to: IO[bytes] | None) -> bytes:
    """The content of an answer, up to `most` bytes, or written to `to`."""
    read = bytearray()
    size = 0
    for piece in answer.iter_content(2**16):
        size += len(piece)
        if to is not None:
            to.write(piece)
        else:
            read += piece
        if size > most:
            break
    return bytes(read[:most])


@contextmanager
def _archive(source: str | Path, image_mib: int) -> Iterator[tuple[str, IO[bytes] | None]]:
    """Name of an image on the server, and the archive to send where it has none of that name."""
    if isinstance(source, str):
        yield source, None
    elif not source.exists():
        raise roots.no_source(source)
    elif source.is_dir():
        if roots.used(source, most=image_mib * MIB) > image_mib * MIB:
            raise roots.too_large(source, image_mib * MIB)
        with tempfile.TemporaryFile() as archive:
            roots.pack(source, archive, image_mib * MIB, _undated)
            yield _named(archive), archive
    else:
        found = source.stat()
        with source.open("rb") as archive:
            yield _name_of(source.resolve(), found.st_size, found.st_mtime_ns), archive


def _undated(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """The same content has the same archive, whenever a directory was put together."""
    return member.replace(mtime=0 if member.isdir() else int(member.mtime), deep=False)


@functools.lru_cache(1024)
def _name_of(path: Path, size: int, changed: int) -> str:
    with path.open("rb") as archive:
        return _named(archive)


def _named(archive: IO[bytes]) -> str:
    archive.seek(0, os.SEEK_SET)
    return f"sha256-{hashlib.file_digest(archive, 'sha256').hexdigest()}"
