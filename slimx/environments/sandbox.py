"""Runs Python that a model wrote, so that it can harm neither the machine nor the run.

    slimx --> unshare (a user namespace of its own, where processes are counted) --> prlimit --> bubblewrap --> python

bubblewrap (Debian: `bubblewrap`) gives the code its own user, process, network, mount and host name spaces, no
capabilities, and nothing but /usr to read and a small /tmp to write. A filter denies the system calls that would lead
out of that (`seccomp`), resource limits bound each process, and where the machine allows it a memory control group
bounds all of them together (`memory_group`). As root the code runs as nobody: limits on the number of processes do not
bind root. How the code ended is read from bubblewrap, over a descriptor that the code does not have.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

from slimx.environments import memory_group, sandbox_probe, seccomp
from slimx.environments.sandbox_watch import Ended, Limits, SandboxWatch, end
from slimx.errors import SlimxError

NOBODY = 65534
OWN_PROCESSES = 4
"""Processes of the sandbox itself: two of bubblewrap's, the interpreter, and one to spare."""
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Ran:
    """Result of one run of code."""

    stdout: str
    stderr: str
    ended: Ended
    """End of the code: exit, by itself; stop, told to; else killed at the limit of that name."""
    status: int | None
    """Exit status, 128 + signal number if a signal ended it; None if it was killed at a limit."""
    seconds: float

    @property
    def ok(self) -> bool:
        return self.ended == "exit" and self.status == 0


async def in_thread[T](call: Callable[[threading.Event], T]) -> T:
    """Have `call` run in a thread that only sandboxes use, so that a hundred slow programs delay nobody but each other.
    The event that it gets is set when the awaiting task is cancelled."""
    stop = threading.Event()
    try:
        return await asyncio.get_running_loop().run_in_executor(_threads(), call, stop)
    except asyncio.CancelledError:
        stop.set()
        raise


@cache
def _threads() -> ThreadPoolExecutor:
    """Threads of the sandbox, as many as there are processors: more programs at once would only run each other into
    their time limit. On a small machine some more, since what waits for a place waits within the deadline of its
    turn."""
    return ThreadPoolExecutor(max(8, len(os.sched_getaffinity(0))), thread_name_prefix="slimx-sandbox")


@cache
def _place() -> memory_group.Hierarchy | None:
    return memory_group.find()


@cache
def _can_disable_userns(bwrap: str) -> bool:
    """bubblewrap has the option from 0.8 on; where it is older, the system call filter alone denies them."""
    return "--disable-userns" in subprocess.run([bwrap, "--help"], capture_output=True, text=True).stdout


class Sandbox:
    """Runs code under `limits`, those of `Limits()` unless given. Any number of runs at once, from any thread."""

    def __init__(self, limits: Limits | None = None):
        """Raises SlimxError for a program that is missing."""
        self.limits = limits or Limits()
        programs = {"bwrap": "bubblewrap", "unshare": "util-linux", "prlimit": "util-linux", "python3": "python3"}
        self._paths: dict[str, str] = {}
        for program, package in programs.items():
            # The environment that runs slimx may lie where nobody can read it, so it is not searched.
            path = shutil.which(program, path="/usr/local/bin:/usr/bin:/bin")
            if path is None:
                raise SlimxError(
                    f"the sandbox needs {program}, which is not in /usr or /bin: apt-get install {package}",
                    code="sandbox.program",
                    about=program,
                )
            self._paths[program] = path
        self._rules = seccomp.program()
        self._place = _place()

    async def run(self, code: str, *, stdin: str = "", files: Mapping[str, str] | None = None) -> Ran:
        """Run `code` as `run_blocking` does, in a thread of the sandbox's own. Cancelling the call ends the code."""
        return await in_thread(lambda stop: self.run_blocking(code, stdin=stdin, files=files, stop=stop))

    def run_blocking(
        self,
        code: str,
        *,
        stdin: str | int = "",
        stdout: int | None = None,
        files: Mapping[str, str] | None = None,
        stop: threading.Event | None = None,
    ) -> Ran:
        """Run `code` as a program. `stdin`: what it reads, or a descriptor that it reads from. `stdout`: a descriptor
        that it writes to, instead of `Ran.stdout`. `files`: contents by name, read-only beside it in /code, where it is
        imported from. It is killed once `stop` is set.

        Raises SlimxError if the sandbox itself cannot start."""
        with contextlib.ExitStack() as open_now:
            named = open_now.enter_context(_files({**(files or {}), "main.py": code}))
            rules = open_now.enter_context(_descriptor(self._rules))
            told = open_now.enter_context(_pipe())
            group, go = None, None
            if self._place is not None:
                group = self._place.make((self.limits.memory_mib + self.limits.disk_mib) * MIB)
                open_now.callback(group.remove)
                go = open_now.enter_context(_pipe())
            line = [*self._limited(), *self._enclosed(named), "--seccomp", str(rules)]
            line += ["--json-status-fd", str(told.write), *(("--block-fd", str(go.read)) if go else ())]
            started = time.monotonic()
            process = subprocess.Popen(
                [*line, "--", self._paths["python3"], "-s", "/code/main.py"],
                stdin=stdin if isinstance(stdin, int) else subprocess.PIPE,
                stdout=subprocess.PIPE if stdout is None else stdout,
                stderr=subprocess.PIPE,
                env={},
                pass_fds=[*named.values(), rules, told.write, *((go.read,) if go else ())],
                **({"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}),
            )
            told.close_write()
            try:
                watch = SandboxWatch(process, self.limits, started, told.read, group, go.write if go else None, stop)
                ended = watch.until_the_end(stdin.encode() if isinstance(stdin, str) else b"")
            finally:
                end(process)
                for stream in (process.stdin, process.stdout, process.stderr):
                    if stream is not None:
                        stream.close()
        output, error = (bytes(watch.read[stream]).decode(errors="replace") for stream in ("stdout", "stderr"))
        status = watch.exit_status()
        if ended == "exit" and status is None:
            raise SlimxError(
                f"the sandbox cannot start on this machine: {error.strip()[:300]}", code="sandbox.start", about="bwrap"
            )
        return Ran(output, error, ended, status if ended == "exit" else None, time.monotonic() - started)

    @property
    def memory_bound(self) -> str:
        """The bound that holds for the memory of all processes of a run together."""
        if self._place is not None:
            return f"a control group (version {self._place.version}) holds everything to memory_mib + disk_mib"
        return "each process is held to memory_mib of address space, all together to what they have resident"

    def check(self) -> None:
        """Try to break out, once. Raises SlimxError naming the guarantees that this machine does not give."""
        outside = {
            "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in sandbox_probe.NAMESPACES},
            "processes": self.limits.processes + OWN_PROCESSES,
            "memory": self.limits.memory_mib * MIB,
        }
        ran = self.run_blocking(sandbox_probe.source(), stdin=json.dumps(outside))
        if not ran.ok:
            raise SlimxError(
                f"the sandbox could not be tried ({ran.ended} {ran.status}): {ran.stderr.strip()[-300:]}",
                code="sandbox.probe",
                about=ran.ended,
            )
        missing = [promise for promise, kept in json.loads(ran.stdout).items() if not kept]
        if missing:
            raise SlimxError(
                f"the sandbox does not hold on this machine: {'; '.join(missing)}; allow user namespaces "
                "(sysctl user.max_user_namespaces, or the container's seccomp profile) or leave out what runs code",
                code="sandbox.promise",
                about=missing[0],
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
        # A name space made inside would have powers of its own, and limits of its own.
        return [*words, "--unshare-user", "--disable-userns"] if _can_disable_userns(self._paths["bwrap"]) else words


@contextlib.contextmanager
def _files(contents: Mapping[str, str]) -> Iterator[dict[str, int]]:
    """Descriptors by name of files in memory."""
    with contextlib.ExitStack() as open_now:
        named: dict[str, int] = {}
        for name, content in contents.items():
            if "/" in name or name.startswith("."):
                raise SlimxError(
                    f"the sandbox puts files beside the code, and {name!r} is no plain name",
                    code="sandbox.file",
                    about=name,
                )
            named[name] = open_now.enter_context(_descriptor(content.encode()))
        yield named


@contextlib.contextmanager
def _descriptor(content: bytes) -> Iterator[int]:
    """The descriptor of a file in memory with this content."""
    with os.fdopen(os.memfd_create("sandbox"), "w+b") as file:
        file.write(content)
        file.flush()
        file.seek(0)
        yield file.fileno()


@dataclass(slots=True)
class _Pipe:
    read: int
    write: int
    writes: bool = True

    def close_write(self) -> None:
        if self.writes:
            os.close(self.write)
            self.writes = False


@contextlib.contextmanager
def _pipe() -> Iterator[_Pipe]:
    pipe = _Pipe(*os.pipe())
    try:
        yield pipe
    finally:
        os.close(pipe.read)
        pipe.close_write()
