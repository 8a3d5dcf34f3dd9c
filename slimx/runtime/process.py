"""A supervised process: a command that logs to a file, and whose process tree ends with a stop or with its owner.

    owner (a Ray worker) --starts--> guard (this file as a program) --starts--> command --starts--> its own children

The guard adopts orphans of the command (Linux "subreaper"), watches the owner, and cleans up the whole tree. A death
signal (prctl) alone is not enough: it fires when the *thread* that started the process ends, and grandchildren do not
receive it.
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
"""Consecutive checks in which a process is found stopped before it counts as lost."""

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL_S = 0.2
ORPHAN_GRACE_S = 5.0
"""Grace period of the command after its owner's death, in seconds."""
LOOK_S = 2.0
"""Seconds between two checks for shared memory and for stopped processes."""
NOT_STARTED = 127
"""Exit status of a guard whose command cannot be started, the same as a shell's."""
KILL_WAIT_S = 10.0
"""Deadline for a killed process tree to end, in seconds."""


class SupervisedProcess:
    """One command under a guard. Not thread-safe: a single owner starts and stops it."""

    def __init__(
        self, name: str, argv: list[str], log_path: Path | str, env: dict[str, str] | None = None, stdin: bytes = b""
    ) -> None:
        """Sets the options. `env` is added to the environment inherited from this process; stdout and stderr are
        appended to `log_path`. `stdin`: input of the command, 64 KiB at most; other processes cannot read it, unlike
        arguments and environment."""
        self.name = name
        self.argv = argv
        self.log_path = Path(log_path)
        self.env = env or {}
        self.stdin = stdin
        self._guard: subprocess.Popen[bytes] | None = None
        self._temporary: str | None = None
        """Directory for the command's temporary files; the guard removes it, or `stop` if the guard was killed."""
        self._log_begins = 0
        """Bytes of the log written by earlier starts."""

    @property
    def pid(self) -> int | None:
        """Process id of the guard, the root of the tree; None before `start`."""
        return None if self._guard is None else self._guard.pid

    def start(self) -> None:
        """Starts the command in its own session: Ctrl-C reaches only the owner, which then stops it cleanly."""
        if self._guard is not None and self._guard.poll() is None:
            raise SlimxError(
                f"{self.name} is already running as process {self._guard.pid}; stop it first",
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
        # The input fits into the pipe, so this does not block; a guard that ended at once shows in `poll`.
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError), pipe:
                pipe.write(self.stdin)

    def poll(self) -> int | None:
        """Returns the exit status (128 + signal number after a signal); None while the command runs."""
        if self._guard is None:
            raise SlimxError(f"{self.name} was never started")
        return self._guard.poll()

    def ended(self) -> str | None:
        """Describes the command's end with its last log lines; None while it runs."""
        status = self.poll()
        if status is None:
            return None
        return f"{self.name} {how_ended(status)}; {quoted(self.log_path, self.tail())}"

    def tail(self, lines: int = 20) -> str:
        """Returns the last lines printed since the last start; reads at most 64 KiB."""
        return log_end(self.log_path, lines, since=self._log_begins)

    def stop(self, grace_s: float = 10.0) -> None:
        """Ends the whole tree: SIGTERM, `grace_s` seconds, then SIGKILL. Blocks until every process is gone."""
        try:
            if self._guard is not None and self._guard.poll() is None:
                self._stop(self._guard, grace_s)
        finally:
            self._clear()

    def _stop(self, guard: subprocess.Popen[bytes], grace_s: float) -> None:
        guard.terminate()
        guard.send_signal(signal.SIGCONT)  # a stopped guard could not end its children
        try:
            guard.wait(grace_s)
            return
        except subprocess.TimeoutExpired:
            kill_descendants(guard.pid)
        try:
            guard.wait(KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            guard.kill()
            raise DeadlineError(f"the end of {self.name} after SIGKILL", KILL_WAIT_S, f"process {guard.pid}") from None

    def _clear(self) -> None:
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None


def guarded_argv(argv: Sequence[str], *options: str) -> list[str]:
    """Returns the command that runs `argv` under a guard; this process must start it."""
    return python_argv("slimx.runtime.process", "--owner", str(os.getpid()), *options, "--", *argv)


def end_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Makes the kernel send `signum` to this process when the thread that started it ends; exits if `parent` ended."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(128 + signum)


def adopt_orphans() -> None:
    """Makes orphaned descendants, such as daemons, children of this process."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants(pid: int) -> None:
    """Sends SIGKILL to all descendants of `pid` until none is left (a process may fork while it is being killed)."""
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
    raise DeadlineError(f"the descendants of process {pid} to end", KILL_WAIT_S, ", ".join(map(str, alive)))


def guard(owner: int, argv: list[str], temporary: str | None = None) -> int:
    """Runs `argv` until it ends, SIGTERM arrives, `owner` dies or one of its processes stays stopped. Returns its exit
    status once its process tree is gone.

    `temporary`: a directory for the command's temporary files, removed at the end. SGLang leaves seven files and
    sockets behind.
    """
    adopt_orphans()
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: signals.append(signum))
    # The guard's only thread lives as long as the guard, so the death signal is safe here: it covers a killed guard.
    guard_pid = os.getpid()
    environment = os.environ if temporary is None else {**os.environ, "TMPDIR": temporary}
    try:
        command = subprocess.Popen(argv, env=environment, preexec_fn=lambda: end_with_parent(guard_pid))
    except OSError as error:
        print(f"{argv[0]} cannot be started: {error}", file=sys.stderr)
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
        with contextlib.suppress(FileNotFoundError):  # other programs delete their files at the same time
            if file.stat().st_ino in shared:
                file.unlink()
    if temporary is not None:
        shutil.rmtree(temporary, ignore_errors=True)
    return status


def _kill_stopped(stop_watch: StopWatch, owner: int) -> bool:
    """Reports stopped processes and kills the owner if it is one. Returns True if the guard's tree must be killed."""
    in_tree = False
    for process in stop_watch.look():
        with contextlib.suppress(psutil.NoSuchProcess):
            print(f"slimx: {process.name()} (process {process.pid}) is stopped: it is killed", flush=True)
            if process.pid == owner:
                process.kill()
            else:
                in_tree = True
    return in_tree


def shared_memory_inodes(pid: int) -> set[int]:
    """Returns the inodes in /dev/shm mapped by descendants of `pid`, mostly semaphores of multiprocessing.

    A killed process does not remove them, nor does its resource tracker if it is killed too. Inodes instead of names,
    because glibc maps a semaphore under a temporary name before it gets its final one.
    """
    inodes: set[int] = set()
    for process in psutil.Process(pid).children(recursive=True):
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        except OSError:
            continue  # it has ended
        # address, permissions, offset, device, inode, path
        for line in maps.splitlines():
            if " /dev/shm/" in line:
                inodes.add(int(line.split()[4]))
    return inodes


def _reap(pid: int) -> int | None:
    """Reaps all ended children (adopted ones too). Returns the exit status of `pid` if it is among them, else None."""
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
    """Finds stopped processes (SIGSTOP) among the descendants of a guard, and its owner if that is a Ray worker.

    They never respond, and nothing reports that to the processes that wait for them. Processes that are busy or
    attached to a debugger or profiler are in other states, however long they are silent."""

    def __init__(self, guard: int, owner: int):
        self._guard = psutil.Process(guard)
        self._owner = owner
        self._looks: Counter[psutil.Process] = Counter()

    def look(self) -> list[psutil.Process]:
        """Returns the processes found stopped in the last LOOKS checks.

        Checks are counted instead of seconds: a guard that was stopped itself has not checked meanwhile.
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
            # Nothing restarts another owner, such as the driver; and if the raylet is stopped, the whole run is.
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
