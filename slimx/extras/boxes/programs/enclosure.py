"""Runs one program in namespaces, with limits and a system call filter, on the file systems that the caller chooses.

    slimx --> unshare (a new user namespace, where processes are counted) --> prlimit --> bubblewrap --> program

`Sandbox` uses it to run Python in an empty root, `BubblewrapBox` to run any program in a persistent root directory.
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
EXTRA_PROCESSES = 4
"""Processes of the enclosure itself: two of bubblewrap, the program, and one spare."""
MIB = 2**20
WAITING = 256
"""Maximum number of programs in containers and on servers that are awaited at once."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """Result of one program."""

    stdout: str
    stderr: str
    ended: Ended
    """Kind of end: "exit" by itself, "stop" on request; else the limit that it was killed at."""
    status: int | None
    """Exit status, 128 + signal number if a signal ended it; None if it was stopped or killed at a limit."""
    seconds: float

    @property
    def ok(self) -> bool:
        return self.ended == "exit" and self.status == 0

    @property
    def ending(self) -> str:
        """End of the program in words, for a message."""
        return how_ended(self.status) if self.ended == "exit" else f"was ended by {self.ended}"


async def in_thread[T](call: Callable[[threading.Event], T], *, waits: bool = False) -> T:
    """Runs `call` in a thread that only sandboxes use, so slow programs only delay each other. `waits`: the program
    runs elsewhere and the thread only waits for it. Sets the event that `call` receives when the awaiting task is
    cancelled."""
    stop = threading.Event()
    executor = _waiting() if waits else _threads()
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, call, stop)
    except asyncio.CancelledError:
        stop.set()
        raise


@cache
def _threads() -> ThreadPoolExecutor:
    """Returns threads for programs on this machine, one per processor: more programs at once would only slow each other
    into their time limit. At least 8, because a program that waits for a thread uses up the deadline of its turn."""
    return ThreadPoolExecutor(max(8, len(os.sched_getaffinity(0))), thread_name_prefix="slimx-sandbox")


@cache
def _waiting() -> ThreadPoolExecutor:
    """Returns threads that wait for programs elsewhere."""
    return ThreadPoolExecutor(WAITING, thread_name_prefix="slimx-boxes")


@cache
def _hierarchy() -> memory_group.Hierarchy | None:
    return memory_group.find()


@cache
def _can_disable_userns(bwrap: str) -> bool:
    """Returns True if bubblewrap has the option, since 0.8. Before, only the system call filter denies namespaces."""
    return "--disable-userns" in subprocess.run([bwrap, "--help"], capture_output=True, text=True).stdout


class NotStarted(SlimxError):
    """Raised if the program did not start."""

    def __init__(self, message: str):
        super().__init__(f"the sandbox cannot start on this machine: {message}", code="sandbox.start", about="bwrap")
        self.message = message
        """bubblewrap's error message; the program cannot have written it."""


PACKAGES = {"bwrap": "bubblewrap", "unshare": "util-linux", "prlimit": "util-linux"}


class Enclosure:
    """Runs programs under `limits`. Any number of runs at once, from any thread."""

    def __init__(self, limits: Limits, *programs: str):
        """Locates the programs that it needs. `programs`: additional ones. Raises SlimxError for a missing one."""
        self.limits = limits
        self.paths: dict[str, str] = {}
        for program in ("bwrap", "unshare", "prlimit", *programs):
            # Not PATH: the unprivileged user may not be able to read the environment that runs slimx.
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
        self.hierarchy = _hierarchy()

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
    ) -> ProgramResult:
        """Runs `command` on the file systems of bubblewrap's options `file_systems`.

        `group_mib`: memory limit of all processes together, if the machine supports it. `passed`: descriptors that
        bubblewrap reads. `stdin`: input of the program, or a descriptor. `stdout`: descriptor for its output. `stop`:
        ends it when set. `disk_used`: returns the bytes on disk, given the outermost process id.

        Raises NotStarted."""
        with contextlib.ExitStack() as resources:
            rules = resources.enter_context(descriptor(self._rules))
            status_pipe = resources.enter_context(_pipe())
            line = [*self._limited(), *self._enclosed(), *file_systems, "--seccomp", str(rules)]
            line += ["--json-status-fd", str(status_pipe.write)]
            descriptors = [*passed, rules, status_pipe.write]
            group = None
            go = None
            if self.hierarchy is not None:
                group = self.hierarchy.make(group_mib * MIB)
                resources.callback(group.remove)
                go_pipe = resources.enter_context(_pipe())
                go = go_pipe.write
                line += ["--block-fd", str(go_pipe.read)]
                descriptors.append(go_pipe.read)
            started = time.monotonic()
            process = _start([*line, "--", *command], stdin, stdout, descriptors)
            status_pipe.close_write()
            try:
                watch = SandboxWatch(
                    process,
                    self.limits,
                    started,
                    status_fd=status_pipe.read,
                    group=group,
                    go=go,
                    stop=stop,
                    disk_used=disk_used,
                )
                ended = watch.until_the_end(stdin.encode() if isinstance(stdin, str) else b"")
            finally:
                end(process)
                for stream in (process.stdin, process.stdout, process.stderr):
                    if stream is not None:
                        stream.close()
        output = watch.read["stdout"].decode(errors="replace")
        error = watch.read["stderr"].decode(errors="replace")
        status = watch.exit_status() if ended == "exit" else None
        if ended == "exit" and status is None:
            raise NotStarted(error.strip()[:300])
        return ProgramResult(output, error, ended, status, time.monotonic() - started)

    def _limited(self) -> list[str]:
        limits = self.limits
        return [
            # The kernel counts a user's processes per user namespace; a new one counts only those of this program.
            *(self.paths["unshare"], "--user", "--map-current-user", "--"),
            self.paths["prlimit"],
            f"--nproc={limits.processes + EXTRA_PROCESSES}",
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
        # In a nested namespace the program would have capabilities, and other limits.
        if _can_disable_userns(self.paths["bwrap"]):
            words += ["--unshare-user", "--disable-userns"]
        return words


def _start(
    line: Sequence[str], stdin: str | int, stdout: int | None, descriptors: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Starts a process with an empty environment, as an unprivileged user if this process is root."""
    as_root = os.geteuid() == 0
    return subprocess.Popen(
        line,
        stdin=stdin if isinstance(stdin, int) else subprocess.PIPE,
        stdout=subprocess.PIPE if stdout is None else stdout,
        stderr=subprocess.PIPE,
        env={},
        pass_fds=descriptors,
        user=NOBODY if as_root else None,
        group=NOBODY if as_root else None,
        extra_groups=[] if as_root else None,
    )


@contextlib.contextmanager
def descriptor(content: bytes) -> Iterator[int]:
    """Yields the descriptor of an in-memory file with this content."""
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
