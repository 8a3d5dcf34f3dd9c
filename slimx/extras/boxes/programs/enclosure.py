"""Runs one program behind name spaces, limits and a filter of system calls, whatever file systems it is given.

    slimx --> unshare (a user namespace of its own, where processes are counted) --> prlimit --> bubblewrap --> program

`Sandbox` runs Python in an empty root with it, `BubblewrapBox` any program in a root directory that stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

from slimx.errors import SlimxError
from slimx.extras.boxes.programs import memory_group, seccomp
from slimx.extras.boxes.programs.watch import Ended, Limits, SandboxWatch, end
from slimx.runtime.logs import how_ended

NOBODY = 65534
OWN_PROCESSES = 4
"""Processes of the enclosure itself: two of bubblewrap's, the program, and one to spare."""
MIB = 2**20
WAITING = 256
"""Programs in containers and on servers that are awaited at once."""


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

    @property
    def ending(self) -> str:
        """The end in words, for a message."""
        return how_ended(self.status) if self.ended == "exit" else f"was ended by {self.ended}"


async def in_thread[T](call: Callable[[threading.Event], T], *, waits: bool = False) -> T:
    """Have `call` run in a thread that only sandboxes use, so that a hundred slow programs delay nobody but each other.
    `waits`: the program runs elsewhere, and the thread waits for it. The event that `call` gets is set when the
    awaiting task is cancelled."""
    stop = threading.Event()
    try:
        return await asyncio.get_running_loop().run_in_executor(_waiting() if waits else _threads(), call, stop)
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
def _waiting() -> ThreadPoolExecutor:
    """Threads that wait for programs which others run."""
    return ThreadPoolExecutor(WAITING, thread_name_prefix="slimx-boxes")


@cache
def _place() -> memory_group.Hierarchy | None:
    return memory_group.find()


@cache
def _can_disable_userns(bwrap: str) -> bool:
    """bubblewrap has the option from 0.8 on; where it is older, the system call filter alone denies them."""
    return "--disable-userns" in subprocess.run([bwrap, "--help"], capture_output=True, text=True).stdout


class NotStarted(SlimxError):
    """Raised if nothing of the program has run."""

    def __init__(self, said: str):
        super().__init__(f"the sandbox cannot start on this machine: {said}", code="sandbox.start", about="bwrap")
        self.said = said
        """The words of bubblewrap; nothing inside had begun that could have written them."""


PACKAGES = {"bwrap": "bubblewrap", "unshare": "util-linux", "prlimit": "util-linux"}


class Enclosure:
    """Runs programs under `limits`. Any number of runs at once, from any thread."""

    def __init__(self, limits: Limits, *programs: str):
        """`programs`: others that are needed beside its own. Raises SlimxError for one that is missing."""
        self.limits = limits
        self.paths: dict[str, str] = {}
        for program in ("bwrap", "unshare", "prlimit", *programs):
            # The environment that runs slimx may lie where nobody can read it, so it is not searched.
            path = shutil.which(program, path="/usr/local/bin:/usr/bin:/bin")
            if path is None:
                raise SlimxError(
                    f"the sandbox needs {program}, which is not in /usr or /bin: "
                    f"apt-get install {PACKAGES.get(program, program)}",
                    code="sandbox.program",
                    about=program,
                )
            self.paths[program] = path
        self._rules = seccomp.program()
        self.place = _place()

    def run(
        self,
        file_systems: Sequence[str],
        command: Sequence[str],
        *,
        group_mib: int,
        passed: Sequence[int] = (),
        stdin: str | int = "",
        stdout: int | None = None,
        stop: threading.Event | None = None,
        disk_used: Callable[[int], int] | None = None,
    ) -> Ran:
        """Run `command` where bubblewrap's words `file_systems` say what it sees.

        `group_mib`: memory of everything together, where the machine can bound it. `passed`: descriptors that
        bubblewrap reads. `stdin`: what the program reads, or a descriptor. `stdout`: a descriptor that it writes to.
        `stop`: ends it. `disk_used`: bytes on disk, asked with the outermost process's number while it runs.

        Raises NotStarted."""
        with contextlib.ExitStack() as open_now:
            rules = open_now.enter_context(descriptor(self._rules))
            told = open_now.enter_context(_pipe())
            group, go = None, None
            if self.place is not None:
                group = self.place.make(group_mib * MIB)
                open_now.callback(group.remove)
                go = open_now.enter_context(_pipe())
            line = [*self._limited(), *self._enclosed(), *file_systems, "--seccomp", str(rules)]
            line += ["--json-status-fd", str(told.write), *(("--block-fd", str(go.read)) if go else ())]
            started = time.monotonic()
            process = subprocess.Popen(
                [*line, "--", *command],
                stdin=stdin if isinstance(stdin, int) else subprocess.PIPE,
                stdout=subprocess.PIPE if stdout is None else stdout,
                stderr=subprocess.PIPE,
                env={},
                pass_fds=[*passed, rules, told.write, *((go.read,) if go else ())],
                **({"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}),
            )
            told.close_write()
            try:
                watch = SandboxWatch(
                    process, self.limits, started, told.read, group, go.write if go else None, stop, disk_used
                )
                ended = watch.until_the_end(stdin.encode() if isinstance(stdin, str) else b"")
            finally:
                end(process)
                for stream in (process.stdin, process.stdout, process.stderr):
                    if stream is not None:
                        stream.close()
        output, error = (bytes(watch.read[stream]).decode(errors="replace") for stream in ("stdout", "stderr"))
        status = watch.exit_status()
        if ended == "exit" and status is None:
            raise NotStarted(error.strip()[:300])
        return Ran(output, error, ended, status if ended == "exit" else None, time.monotonic() - started)

    def _limited(self) -> list[str]:
        limits = self.limits
        return [
            # The kernel counts a user's processes per user namespace: in a fresh one, only ours are counted.
            *(self.paths["unshare"], "--user", "--map-current-user", "--"),
            self.paths["prlimit"],
            f"--nproc={limits.processes + OWN_PROCESSES}",
            f"--as={limits.memory_mib * MIB}",
            f"--fsize={limits.disk_mib * MIB}",
            f"--cpu={int(limits.seconds * (limits.processes + 1)) + 1}",
            "--nofile=256",
            "--core=0",
            "--",
        ]

    def _enclosed(self) -> list[str]:
        words = [self.paths["bwrap"], "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        words += ["--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox"]
        # A name space made inside would have powers of its own, and limits of its own.
        if _can_disable_userns(self.paths["bwrap"]):
            words += ["--unshare-user", "--disable-userns"]
        return words


@contextlib.contextmanager
def descriptor(content: bytes) -> Iterator[int]:
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
