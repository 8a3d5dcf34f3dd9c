"""A supervised process: a command that logs to a file, and whose process tree is ended by `stop` or when its owner
ends.

    owner (a Ray worker) --starts--> guard (this file as a program) --starts--> command --starts--> its own children

The guard adopts orphaned descendants of the command (Linux "subreaper"), watches the owner, and ends the whole tree.
A parent death signal (prctl) alone is not enough: it is sent when the *thread* that started the process ends, and only
to children, not to grandchildren.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil

from slimx.errors import DeadlineError, SlimxError
from slimx.runtime.children import child_environment, python_argv
from slimx.runtime.logs import how_ended, log_end, quoted

LOOKS = 3
"""Number of consecutive checks in which a process must be found stopped (SIGSTOP) before it counts as lost."""

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL_S = 0.2
ORPHAN_GRACE_S = 5.0
"""Grace period, in seconds, for the command to shut down once its owner has died; after that it is killed."""
LOOK_S = 2.0
"""Seconds between two checks of the process tree for newly mapped shared memory and for stopped processes."""
NOT_STARTED = 127
"""Exit status of the guard if its command cannot be started, the same as a shell's."""
KILL_WAIT_S = 10.0
"""Seconds within which a process tree must have ended after SIGKILL."""


class SupervisedProcess:
    """A command that runs under a guard process. Not thread-safe: only one owner may start and stop it."""

    def __init__(
        self, name: str, argv: list[str], log_path: Path | str, env: dict[str, str] | None = None, stdin: bytes = b""
    ) -> None:
        """Stores the settings; `start` starts the command.

        `name`: name of the command in error messages. `argv`: the command line. stdout and stderr are appended to
        `log_path`. `env` is added to the environment that this process passes on. `stdin`: input of the command, at
        most 64 KiB, which, unlike arguments and environment, cannot be read by other processes."""
        self.name = name
        self.argv = argv
        self.log_path = Path(log_path)
        self.env = env or {}
        self.stdin = stdin
        self._guard: subprocess.Popen[bytes] | None = None
        self._temporary: str | None = None
        """Directory for the command's temporary files. The guard removes it, or `stop` does if the guard was killed."""
        self._log_begins = 0
        """Size of the log in bytes when the command was last started."""

    @property
    def pid(self) -> int | None:
        """Process id of the guard, which is the root of the process tree; None before `start`."""
        return None if self._guard is None else self._guard.pid

    def start(self) -> None:
        """Starts the command in a new session, so that Ctrl-C reaches only the owner, which then shuts the command down
        cleanly. Raises SlimxError if it is already running."""
        if self._guard is not None and self._guard.poll() is None:
            raise SlimxError(
                f"{self.name} is already running as process {self._guard.pid}; stop this process first",
            )
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._clear()
        self._temporary = tempfile.mkdtemp(prefix="slimx-")
        guard = guarded_argv(self.argv, "--temporary", self._temporary)
        with self.log_path.open("ab") as log:
            self._log_begins = log.tell()
            self._guard = subprocess.Popen(
                guard,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=child_environment(os.environ) | self.env,
            )
        pipe = self._guard.stdin
        # The input fits into the pipe, so this does not block. `poll` reports a guard that has already ended.
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError), pipe:
                pipe.write(self.stdin)

    def poll(self) -> int | None:
        """Returns the command's exit status, 128 + signal number if a signal ended it; None while the command is
        running."""
        if self._guard is None:
            raise SlimxError(f"{self.name} was never started")
        return self._guard.poll()

    def ended(self) -> str | None:
        """Returns a sentence that says how the command ended and quotes the last lines of its log; None while the
        command is running."""
        status = self.poll()
        if status is None:
            return None
        return f"{self.name} {how_ended(status)}; {quoted(self.log_path, self.tail())}"

    def tail(self, lines: int = 20) -> str:
        """Returns the last `lines` lines that the command has printed since it was last started. Reads at most the last
        64 KiB of the log."""
        return log_end(self.log_path, lines, since=self._log_begins)

    def stop(self, grace_s: float = 10.0) -> None:
        """Ends the whole process tree: sends SIGTERM, waits up to `grace_s` seconds, then sends SIGKILL. Blocks until
        every process has ended."""
        try:
            if self._guard is not None and self._guard.poll() is None:
                self._stop(self._guard, grace_s)
        finally:
            self._clear()

    def _stop(self, guard: subprocess.Popen[bytes], grace_s: float) -> None:
        guard.terminate()
        guard.send_signal(signal.SIGCONT)  # a guard stopped by SIGSTOP could not end its children
        try:
            guard.wait(grace_s)
            return
        except subprocess.TimeoutExpired:
            kill_descendants(guard.pid)
        try:
            guard.wait(KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            guard.kill()
            raise DeadlineError(f"the exit of {self.name} after SIGKILL", KILL_WAIT_S, f"process {guard.pid}") from None

    def _clear(self) -> None:
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None


def guarded_argv(argv: Sequence[str], *options: str) -> list[str]:
    """Returns the command line that runs `argv` under a guard, whose owner is this process. `options`: additional
    options for the guard."""
    return python_argv("slimx.runtime.process", "--owner", str(os.getpid()), *options, "--", *argv)


def end_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Makes the kernel send `signum` to this process when the thread that started it ends. `parent`: process id of the
    parent; exits at once if the parent has already ended."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(128 + signum)


def adopt_orphans() -> None:
    """Makes this process the parent of its orphaned descendants, such as daemons."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants(pid: int) -> None:
    """Sends SIGKILL to all descendants of the process `pid` repeatedly until none is left, because a process may fork
    while others are being killed. Raises DeadlineError if some are left after `KILL_WAIT_S` seconds."""
    deadline = time.monotonic() + KILL_WAIT_S
    while time.monotonic() < deadline:
        try:
            descendants = psutil.Process(pid).children(recursive=True)
            alive = [process for process in descendants if process.status() != psutil.STATUS_ZOMBIE]
        except psutil.NoSuchProcess:
            return
        if not alive:
            return
        for process in alive:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        time.sleep(POLL_S / 4)  # psutil.wait_procs would reap the guard's children
    raise DeadlineError(f"the exit of all descendants of process {pid}", KILL_WAIT_S, ", ".join(map(str, alive)))


def guard(owner: int, argv: list[str], temporary: str | None = None) -> int:
    """Runs `argv` until it ends, SIGTERM arrives, the process `owner` ends, or a process of the tree stays stopped.
    Returns the exit status of `argv`, or 128 + SIGSTOP in the last case, once the whole tree has ended.

    `temporary`: a directory for the command's temporary files, which is removed at the end, because SGLang leaves seven
    files and sockets there.
    """
    adopt_orphans()
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: signals.append(signum))
    # The guard has a single thread, so the death signal is reliable here: it ends the command of a killed guard.
    guard_pid = os.getpid()
    environment = os.environ if temporary is None else {**os.environ, "TMPDIR": temporary}
    try:
        command = subprocess.Popen(argv, env=environment, preexec_fn=lambda: end_with_parent(guard_pid))
    except OSError as error:
        print(f"{argv[0]} cannot be started ({error})", file=sys.stderr)
        return NOT_STARTED
    terminated = False
    kill_at = float("inf")
    look_at = 0.0
    shared: set[int] = set()
    stop_watch = StopWatch(guard_pid, owner)
    while (status := _reap(command.pid)) is None:
        if time.monotonic() > look_at:
            shared |= shared_memory_inodes(guard_pid)
            if _kill_stopped(stop_watch, owner):
                kill_at = 0.0
            look_at = time.monotonic() + LOOK_S
        orphaned = os.getppid() != owner
        if (signals or orphaned) and not terminated:
            os.kill(command.pid, signal.SIGTERM)  # command.terminate() may reap the command before `_reap`
            terminated = True
        if orphaned:
            kill_at = min(kill_at, time.monotonic() + ORPHAN_GRACE_S)
        if time.monotonic() > kill_at:
            kill_descendants(guard_pid)
        time.sleep(POLL_S)
    kill_descendants(guard_pid)
    for file in Path("/dev/shm").iterdir():
        with contextlib.suppress(FileNotFoundError):  # other programs may delete files meanwhile
            if file.stat().st_ino in shared:
                file.unlink()
    if temporary is not None:
        shutil.rmtree(temporary, ignore_errors=True)
    return status if kill_at else 128 + signal.SIGSTOP


def _kill_stopped(stop_watch: StopWatch, owner: int) -> bool:
    """Prints the processes that were found stopped, and kills the owner if it is one of them. Returns True if a process
    other than the owner is stopped, in which case the guard must kill its process tree."""
    in_tree = False
    for process in stop_watch.look():
        with contextlib.suppress(psutil.NoSuchProcess):
            print(f"slimx: {process.name()} (process {process.pid}) is stopped (SIGSTOP), so it is killed", flush=True)
            if process.pid == owner:
                process.kill()
            else:
                in_tree = True
    return in_tree


def shared_memory_inodes(pid: int) -> set[int]:
    """Returns the inodes of files in /dev/shm that descendants of `pid` have mapped, mostly semaphores of
    multiprocessing.

    A killed process does not remove these files, and neither does its resource tracker if that is killed as well.
    Inodes identify the files, because glibc maps a semaphore while its file still has a temporary name.
    """
    inodes: set[int] = set()
    for process in psutil.Process(pid).children(recursive=True):
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        except OSError:
            continue  # the process has ended
        # fields of a line: address, permissions, offset, device, inode, path
        for line in maps.splitlines():
            if " /dev/shm/" in line:
                inodes.add(int(line.split()[4]))
    return inodes


def _reap(pid: int) -> int | None:
    """Collects the exit status of all children that have ended, including adopted ones. Returns the exit status of the
    process `pid` if it is among them, otherwise None."""
    status = None
    while True:
        try:
            ended, raw = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            # No child is left. If another waiter reaped the command, its status is lost.
            return 255 if status is None else status
        if ended == 0:
            return status
        if ended == pid:
            code = os.waitstatus_to_exitcode(raw)
            status = code if code >= 0 else 128 - code


class StopWatch:
    """Detects whether descendants of a guard, or the guard's owner if that is a Ray worker, have been stopped
    (SIGSTOP).

    Stopped processes never respond, and nothing reports this to the processes that wait for them. Processes that are
    busy, or attached to a debugger or profiler, are in other states, however long they are silent."""

    def __init__(self, guard: int, owner: int):
        self._guard = psutil.Process(guard)
        self._owner = owner
        self._looks: Counter[psutil.Process] = Counter()

    def look(self) -> list[psutil.Process]:
        """Returns the processes that were found stopped in each of the last `LOOKS` checks, including this one.

        Checks are counted instead of seconds, because a guard that was stopped itself has made no checks in that time.
        """
        looks: Counter[psutil.Process] = Counter()
        for process in self._watched():
            if _state(process) == psutil.STATUS_STOPPED:
                looks[process] = self._looks[process] + 1
        self._looks = looks
        return [process for process, count in looks.items() if count >= LOOKS]

    def _watched(self) -> list[psutil.Process]:
        watched = self._guard.children(recursive=True)
        try:
            raylet = psutil.Process(self._owner).parent()
            # Only workers of Ray are restarted. If their raylet is stopped, the whole run is.
            if raylet is not None and raylet.name() == "raylet" and _state(raylet) != psutil.STATUS_STOPPED:
                watched.append(psutil.Process(self._owner))
        except psutil.NoSuchProcess:
            pass
        return watched


def _state(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD


if __name__ == "__main__":
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m slimx.runtime.process", description=description)
    parser.add_argument("--owner", type=int, required=True)
    parser.add_argument("--temporary", metavar="DIRECTORY")
    parser.add_argument("argv", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    sys.exit(guard(options.owner, options.argv[1:], options.temporary))
