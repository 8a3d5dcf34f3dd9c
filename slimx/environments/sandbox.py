"""Runs Python that a model wrote, so that it can harm neither the machine nor the run.

    slimx --> unshare (a user namespace of its own, where processes are counted) --> prlimit --> bubblewrap --> python

bubblewrap (Debian: `bubblewrap`) gives the code its own user, process, network, mount and host name spaces, no
capabilities, and nothing but /usr to read and a small /tmp to write. The kernel's resource limits do the rest. As root
the code runs as nobody: limits on the number of processes do not bind root.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import selectors
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import psutil

from slimx.environments import sandbox_probe
from slimx.errors import SlimxError

NOBODY = 65534
OWN_PROCESSES = 4
"""Of the sandbox itself: two of bubblewrap's, the interpreter, and one to spare."""
LOOK_S = 0.05
"""Between two looks at the memory of all processes together."""
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run of code may use."""

    seconds: float = 10.0
    """Wall clock."""
    memory_mib: int = 512
    """Address space of each process, and resident memory of all together."""
    processes: int = 8
    """Besides the first one; threads count."""
    disk_mib: int = 16
    """All files in /tmp together, in memory."""
    output_kib: int = 64
    """Of stdout and of stderr, each."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of the code."""

    stdout: str
    stderr: str
    ended: Literal["exit", "time", "memory", "output"]
    """exit: by itself; else killed at the limit of that name."""
    status: int | None
    """Exit status, 128 + signal number if a signal ended it; None if it was killed at a limit."""
    seconds: float

    @property
    def ok(self) -> bool:
        return self.ended == "exit" and self.status == 0


class Sandbox:
    """Runs code under `limits`. Any number of runs at once, from any thread."""

    def __init__(self, limits: Limits = Limits()):
        """Raises SlimxError for a program that is missing."""
        self.limits = limits
        programs = {"bwrap": "bubblewrap", "unshare": "util-linux", "prlimit": "util-linux", "python3": "python3"}
        self._paths: dict[str, str] = {}
        for program, package in programs.items():
            # The environment that runs slimx may lie where nobody can read it, so it is not searched.
            path = shutil.which(program, path="/usr/local/bin:/usr/bin:/bin")
            if path is None:
                raise SlimxError(
                    f"the sandbox needs {program}, which is not in /usr or /bin: apt-get install {package}"
                )
            self._paths[program] = path

    async def run(self, code: str, *, stdin: str = "", files: Mapping[str, str] | None = None) -> Ran:
        """As `run_blocking`, in a thread. A cancelled call is left to its limits."""
        return await asyncio.to_thread(self.run_blocking, code, stdin=stdin, files=files)

    def run_blocking(self, code: str, *, stdin: str = "", files: Mapping[str, str] | None = None) -> Ran:
        """Run `code` as a program. `files`: contents by name, read-only beside it in /code, where it is imported from.

        Raises SlimxError if the sandbox itself cannot start."""
        with _files({**(files or {}), "main.py": code}) as named:
            started = time.monotonic()
            process = subprocess.Popen(
                [*self._limited(), *self._enclosed(named), self._paths["python3"], "-s", "/code/main.py"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={},
                pass_fds=list(named.values()),
                **({"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}),
            )
            try:
                watch = _Watch(process, self.limits, started)
                ended = watch.until_the_end(stdin.encode())
            finally:
                status = _end(process)
                for stream in (process.stdin, process.stdout, process.stderr):
                    stream.close()
        stdout, stderr = (bytes(watch.read[stream]).decode(errors="replace") for stream in ("stdout", "stderr"))
        if ended == "exit" and status and stderr.startswith(("bwrap: ", "unshare: ", "prlimit: ")):
            raise SlimxError(f"the sandbox cannot start on this machine: {stderr.strip()[:300]}")
        status = 128 - status if status < 0 else status
        return Ran(stdout, stderr, ended, status if ended == "exit" else None, time.monotonic() - started)

    def check(self) -> None:
        """Try to break out, once. Raises SlimxError naming the guarantees that this machine does not give."""
        outside = {
            "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in sandbox_probe.NAMESPACES},
            "processes": self.limits.processes + OWN_PROCESSES,
            "memory": self.limits.memory_mib * MIB,
        }
        ran = self.run_blocking(sandbox_probe.source(), stdin=json.dumps(outside))
        if not ran.ok:
            raise SlimxError(f"the sandbox could not be tried ({ran.ended} {ran.status}): {ran.stderr.strip()[-300:]}")
        missing = [promise for promise, kept in json.loads(ran.stdout).items() if not kept]
        if missing:
            raise SlimxError(
                f"the sandbox does not hold on this machine: {'; '.join(missing)}; allow user namespaces "
                "(sysctl user.max_user_namespaces, or the container's seccomp profile) or leave out what runs code"
            )

    def _limited(self) -> list[str]:
        limits = self.limits
        return [
            # The kernel counts a user's processes per user namespace: in a fresh one, only ours are counted.
            *(self._paths["unshare"], "--user", "--map-current-user", "--"),
            self._paths["prlimit"],
            f"--nproc={limits.processes + OWN_PROCESSES}",
            f"--as={limits.memory_mib * MIB}",
            f"--fsize={limits.disk_mib * MIB}",
            f"--cpu={int(limits.seconds * (limits.processes + 1)) + 1}",
            "--nofile=256",
            "--core=0",
            "--",
        ]

    def _enclosed(self, named: Mapping[str, int]) -> list[str]:
        size = str(self.limits.disk_mib * MIB)
        words = [self._paths["bwrap"], "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        words += ["--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox", "--ro-bind", "/usr", "/usr"]
        for directory in ("bin", "lib", "lib64"):
            if os.path.islink(f"/{directory}"):
                words += ["--symlink", f"usr/{directory}", f"/{directory}"]
            elif os.path.isdir(f"/{directory}"):
                words += ["--ro-bind", f"/{directory}", f"/{directory}"]
        words += ["--proc", "/proc", "--dev", "/dev", "--size", str(MIB), "--tmpfs", "/dev/shm"]
        words += ["--size", size, "--tmpfs", "/tmp"]
        for name, descriptor in named.items():
            words += ["--ro-bind-data", str(descriptor), f"/code/{name}"]
        words += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--clearenv"]
        for name, value in {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}.items():
            words += ["--setenv", name, value]
        return [*words, "--"]


def _end(process: subprocess.Popen[bytes]) -> int:
    """Kill what is left and return bubblewrap's status. With the first process of a process name space the kernel ends
    all others in it, and bubblewrap waits for that one: nothing is left."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for first in psutil.Process(process.pid).children():
            first.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
    process.kill()
    return process.wait()


class _Watch:
    """Feeds a process and reads it until it ends or meets a limit."""

    def __init__(self, process: subprocess.Popen[bytes], limits: Limits, started: float):
        self.process, self.limits = process, limits
        self.deadline = started + limits.seconds
        self.read = {"stdout": bytearray(), "stderr": bytearray()}

    def until_the_end(self, stdin: bytes) -> Literal["exit", "time", "memory", "output"]:
        rest, look = memoryview(stdin), time.monotonic()
        with selectors.DefaultSelector() as ready:
            for name in self.read:
                ready.register(getattr(self.process, name), selectors.EVENT_READ, name)
            ready.register(self.process.stdin, selectors.EVENT_WRITE, "stdin")
            os.set_blocking(self.process.stdin.fileno(), False)
            while ready.get_map():
                now = time.monotonic()
                if now > self.deadline:
                    return "time"
                if now > look:
                    if self._memory() > self.limits.memory_mib * MIB:
                        return "memory"
                    look = now + LOOK_S
                for key, _ in ready.select(min(LOOK_S, self.deadline - now)):
                    if key.data == "stdin":
                        rest = self._feed(rest)
                        if rest is None:
                            ready.unregister(key.fileobj)
                            key.fileobj.close()
                    elif piece := os.read(key.fd, 65536):
                        self.read[key.data] += piece
                        if len(self.read[key.data]) > self.limits.output_kib * 1024:
                            del self.read[key.data][self.limits.output_kib * 1024 :]
                            return "output"
                    else:
                        ready.unregister(key.fileobj)
        try:
            self.process.wait(max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return "time"
        return "exit"

    def _feed(self, rest: memoryview) -> memoryview | None:
        """What is left to write; None when there is nothing, or nobody who reads."""
        try:
            rest = rest[os.write(self.process.stdin.fileno(), rest[:65536]) :] if rest else rest
        except BlockingIOError:
            return rest
        except BrokenPipeError:
            return None
        return rest if rest else None

    def _memory(self) -> int:
        """Resident bytes of everything inside."""
        total = 0
        try:
            inside = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return 0
        for process in inside:
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total


@contextlib.contextmanager
def _files(contents: Mapping[str, str]) -> Iterator[dict[str, int]]:
    """Descriptors by name of files in memory."""
    named: dict[str, int] = {}
    try:
        for name, content in contents.items():
            if "/" in name or name.startswith("."):
                raise SlimxError(f"the sandbox puts files beside the code, and {name!r} is no plain name")
            named[name] = os.memfd_create(name)
            with os.fdopen(os.dup(named[name]), "wb") as file:
                file.write(content.encode())
            os.lseek(named[name], 0, os.SEEK_SET)
        yield named
    finally:
        for descriptor in named.values():
            os.close(descriptor)
