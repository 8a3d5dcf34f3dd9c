"""Boxes of every back end that a test can have here, from one small image."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import psutil

from slimx.extras.boxes.containers import ContainerBox
from slimx.extras.boxes.engines import ContainerEngine
from slimx.extras.boxes.programs.sandbox import Limits
from slimx.extras.boxes.remote import RemoteServer
from tests.needed import missing

SMALL = Limits(seconds=60.0, memory_mib=128, processes=8, disk_mib=8)
START_S = 300.0
"""Seconds for a server to listen; for hangs only."""


def archive(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w") as file:
        for member in members:
            file.addfile(member, io.BytesIO(bytes(member.size)))
    return path


def link(name: str, to: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, to
    return member


def plain(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = size
    return member


def image(path: Path) -> Path:
    """Returns an image that uses this machine's /usr, with a directory /work."""
    work = tarfile.TarInfo("work")
    work.type, work.mode = tarfile.DIRTYPE, 0o777
    return archive(path, link("bin", "usr/bin"), link("lib", "usr/lib"), link("lib64", "/usr/lib64"), work)


@cache
def engine() -> ContainerEngine | str:
    """Returns the container engine that runs boxes here (podman, podman with runc, or docker), or why none does."""
    failures = []
    for words in (("podman",), ("podman", "--runtime", "runc"), ("docker",)):
        try:
            found = ContainerEngine.find(words)
            box = ContainerBox(image(Path(f"/tmp/slimx-test-{os.getpid()}.tar")), SMALL, engine=found, host_usr=True)
            try:
                assert box.run(["true"]).ok
                return found
            finally:
                box.end()
        except Exception as error:
            failures.append(f"{' '.join(words)}: {error}")
        finally:
            Path(f"/tmp/slimx-test-{os.getpid()}.tar").unlink(missing_ok=True)
    return "; ".join(failures)


def needed_engine() -> ContainerEngine:
    """Returns that engine; skips the test where there is none."""
    found = engine()
    if isinstance(found, str):
        missing(f"needs a container engine: {found}")
    return found


@contextmanager
def served(directory: Path, *words: str, under: Sequence[str] = ()) -> Iterator[tuple[RemoteServer, subprocess.Popen]]:
    """Runs a server of bubblewrap's boxes on loopback, in another process, started by the program `under` if given."""
    log = directory / "server.log"
    line = [*under, sys.executable, "-m", "slimx.extras.boxes.serve", "--port", "0", "--host-usr", *words]
    line += ["--token-env", "BOXES_TOKEN"]
    environment = os.environ | {"BOXES_TOKEN": "secret", "TMPDIR": str(directory)}
    with log.open("w") as written:
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=written, env=environment, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), log.read_text()[-2000:]
        yield RemoteServer(url, "secret"), process
    finally:
        process.terminate()
        process.wait(START_S)


def runs(argument: str) -> bool:
    """Returns True while a process of this machine has this argument."""
    return any(argument in (process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
