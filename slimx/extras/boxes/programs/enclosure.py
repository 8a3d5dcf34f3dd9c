"""Runs one program in namespaces, with limits and a system call filter, on file systems that the caller chooses.

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
"""Number of processes of the sandbox itself: two of bubblewrap, the program's first process, and one spare."""
MIB = 2**20
WAITING = 256
"""Maximum number of threads that wait for programs in containers or on sandbox servers."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """Outcome of running one program in the sandbox."""

    stdout: str
    stderr: str
    ended: Ended
    """"exit" if the program exited by itself, "stop" if it was stopped on request, otherwise the limit at which it was
    killed."""
    status: int | None
    """Exit status, or 128 + signal number if a signal killed it; None if it was stopped or killed at a limit."""
    seconds: float

    @property
    def ok(self) -> bool:
        return self.ended == "exit" and self.status == 0

    @property
    def ending(self) -> str:
        """Description of how the program ended, for messages."""
        return how_ended(self.status) if self.ended == "exit" else f"was killed (reason: {self.ended})"


async def in_thread[T](call: Callable[[threading.Event], T], *, waits: bool = False) -> T:
    """Runs `call` in a thread that only sandboxes use, so that slow programs delay only each other.

    `call` receives an event that is set when the awaiting task is cancelled. `waits`: True if the program runs
    elsewhere and the thread only waits for it.
    """
    stop = threading.Event()
    executor = _waiting() if waits else _threads()
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, call, stop)
    except asyncio.CancelledError:
        stop.set()
        raise


@cache
def _threads() -> ThreadPoolExecutor:
    """Returns the thread pool that runs programs on this machine, with one thread per processor, because more programs
    at once would slow each other down until they reach their time limit. There are at least 8 threads, because a
    program's wait for a thread counts towards the deadline of the rollout's turn."""
    return ThreadPoolExecutor(max(8, len(os.sched_getaffinity(0))), thread_name_prefix="slimx-sandbox")


@cache
def _waiting() -> ThreadPoolExecutor:
    """Returns the pool of threads that wait for programs in containers and on servers."""
    return ThreadPoolExecutor(WAITING, thread_name_prefix="slimx-boxes")


@cache
def _hierarchy() -> memory_group.Hierarchy | None:
    return memory_group.find()


@cache
def _can_disable_userns(bwrap: str) -> bool:
    """Returns True if bubblewrap has the option --disable-userns, as it does since 0.8. Without it, only the system
    call filter denies namespaces."""
    return "--disable-userns" in subprocess.run([bwrap, "--help"], capture_output=True, text=True).stdout


class NotStarted(SlimxError):
    """Raised if the sandbox failed before it started the program."""

    def __init__(self, message: str):
        super().__init__(
            f"the sandbox cannot start on this machine ({message}); allow user namespaces, or remove from the "
            "configuration the hooks that run code",
            code="sandbox.start",
            about="bwrap",
        )
        self.message = message
        """Error message of bubblewrap, which the program cannot have written."""


PACKAGES = {"bwrap": "bubblewrap", "unshare": "util-linux", "prlimit": "util-linux"}


class Enclosure:
    """Runner of programs in Linux namespaces under `limits`; runs any number of programs at a time, from any thread."""

    def __init__(self, limits: Limits, *programs: str):
        """Locates the programs that the sandbox needs.

        `programs`: names of additional programs to locate. Raises SlimxError if one is not installed.
        """
        self.limits = limits
        self.paths: dict[str, str] = {}
        for program in ("bwrap", "unshare", "prlimit", *programs):
            # Ignores PATH, because the unprivileged user may not be able to read slimx's Python environment.
            path = shutil.which(program, path="/usr/local/bin:/usr/bin:/bin")
            if path is None:
                raise SlimxError(
                    f"the sandbox needs {program}, which is not in /usr/local/bin, /usr/bin or /bin; "
                    f"run `apt-get install {PACKAGES.get(program, program)}`",
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
        """Runs `command` and returns its result.

        `file_systems`: options of bubblewrap that mount the file systems. `group_mib`: limit on the total memory of all
        processes, if the machine supports it. `passed`: descriptors that bubblewrap inherits and reads. `stdin`: input
        of the program, as text or as a descriptor. `stdout`: descriptor for its output; None to return the output.
        `stop`: event that stops the program when set. `disk_used`: function that returns the number of bytes used on
        disk, given the id of the outermost process.

        Raises NotStarted if the program did not start.
        """
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
            # The kernel counts a user's processes per user namespace, so a new namespace counts only this program's.
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
        # In a nested user namespace the program would have capabilities and separate limits.
        if _can_disable_userns(self.paths["bwrap"]):
            words += ["--unshare-user", "--disable-userns"]
        return words


def _start(
    line: Sequence[str], stdin: str | int, stdout: int | None, descriptors: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Starts a process with an empty environment, as an unprivileged user if this process runs as root."""
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
    """Yields the descriptor of an in-memory file with `content`."""
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
