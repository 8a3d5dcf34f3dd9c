"""A supervised process: a command that writes to a file, and whose whole tree ends with a stop or with its owner.

    owner (a Ray worker) --starts--> guard (this file as a program) --starts--> command --starts--> its own children

The guard adopts orphans of the command (Linux "subreaper"), watches the owner, and leaves nothing behind. A death
signal (prctl) alone would not do: it fires when the *thread* that started the process ends, and grandchildren do not
get it.
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
"""Looks in a row that find a process stopped, after which it counts as lost."""

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL_S = 0.2
ORPHAN_GRACE_S = 5.0
"""Seconds that the command gets to end by itself after its owner died."""
LOOK_S = 2.0
"""Seconds between two looks at the tree's shared memory, and for stopped processes."""
NOT_STARTED = 127
"""Exit status of a guard whose command cannot be started, as of a shell."""
KILL_WAIT_S = 10.0
"""Seconds in which a killed tree must be gone."""


class SupervisedProcess:
    """One command under a guard. Not thread-safe: one owner starts and stops it."""

    def __init__(
        self, name: str, argv: list[str], log_path: Path | str, env: dict[str, str] | None = None, stdin: bytes = b""
    ) -> None:
        """`env` is added to what a child gets of this process's environment; stdout and stderr are appended to
        `log_path`. `stdin`: what the command reads there, 64 KiB at most; unlike arguments and environment, other
        processes do not see it."""
        self.name, self.argv, self.log_path, self.env = name, argv, Path(log_path), env or {}
        self.stdin = stdin
        self._guard: subprocess.Popen | None = None
        self._temporary: str | None = None
        """The command's own directory for temporary files, which the guard removes; a guard that is killed cannot."""
        self._log_begins = 0
        """Bytes of the log that earlier starts wrote."""

    @property
    def pid(self) -> int | None:
        """Process id of the guard, the root of the tree; None before `start`."""
        return self._guard and self._guard.pid

    def start(self) -> None:
        """Start the command in its own session: Ctrl-C reaches only the owner, which then stops it in order."""
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
        # It fits into the pipe, so this waits for nobody; a guard that ended at once shows in `poll`.
        with contextlib.suppress(BrokenPipeError), self._guard.stdin as pipe:
            pipe.write(self.stdin)

    def poll(self) -> int | None:
        """None while it runs, else its exit status (128 + signal number if a signal ended it)."""
        if self._guard is None:
            raise SlimxError(f"{self.name} was never started")
        return self._guard.poll()

    def ended(self) -> str | None:
        """The end of the command and its last lines, in words; None while it runs."""
        if (status := self.poll()) is None:
            return None
        return f"{self.name} {how_ended(status)}; {quoted(self.log_path, self.tail())}"

    def tail(self, lines: int = 20) -> str:
        """The last lines that it printed since its last start; reads at most 64 KiB."""
        return log_end(self.log_path, lines, since=self._log_begins)

    def stop(self, grace_s: float = 10.0) -> None:
        """End the whole tree: SIGTERM, `grace_s` seconds, then SIGKILL. Blocks; nothing is left when it returns."""
        try:
            if self._guard is not None and self._guard.poll() is None:
                self._stop(self._guard, grace_s)
        finally:
            self._clear()

    def _stop(self, guard: subprocess.Popen, grace_s: float) -> None:
        guard.terminate()
        guard.send_signal(signal.SIGCONT)  # a guard that was stopped could not end anything
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
    """Returns the command that runs `argv` under a guard, which this process must start."""
    return python_argv("slimx.runtime.process", "--owner", str(os.getpid()), *options, "--", *argv)


def end_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send `signum` to this process when the thread that started it ends; exit if `parent` is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(128 + signum)


def adopt_orphans() -> None:
    """Have what descends from this process stay below it when its parent ends, as a daemon's does on purpose."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants(pid: int) -> None:
    """SIGKILL every descendant of `pid`, until a look finds none (a process may fork while it is being killed)."""
    deadline = time.monotonic() + KILL_WAIT_S
    while time.monotonic() < deadline:
        try:
            alive = [p for p in psutil.Process(pid).children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
        except psutil.NoSuchProcess:
            return
        if not alive:
            return
        for process in alive:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        time.sleep(POLL_S / 4)  # not psutil.wait_procs: it would reap the guard's children behind its back
    raise DeadlineError(f"the descendants of process {pid} to end", KILL_WAIT_S, ", ".join(map(str, alive)))


def guard(owner: int, argv: list[str], temporary: str | None = None) -> int:
    """Run `argv` until it ends, SIGTERM arrives, `owner` dies or one of its processes stays stopped; return its exit
    status once its tree is gone.

    `temporary`: a directory for the command's temporary files, which goes with it. SGLang leaves seven files and
    sockets where they are made.
    """
    adopt_orphans()
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: asked.append(signum))
    # The guard has one thread that lives as long as it does, so the death signal is safe here: it covers a killed
    # guard.
    myself = os.getpid()
    environment = os.environ if temporary is None else {**os.environ, "TMPDIR": temporary}
    try:
        command = subprocess.Popen(argv, env=environment, preexec_fn=lambda: end_with_parent(myself))
    except OSError as error:
        print(f"{argv[0]} cannot be started: {error}", file=sys.stderr)
        return NOT_STARTED
    told, kill_at, look_at, shared = False, float("inf"), 0.0, set()
    stop_watch = StopWatch(myself, owner)
    while (status := _reap(command.pid)) is None:
        if time.monotonic() > look_at:
            shared |= shared_memory_inodes(myself)
            for process in stop_watch.look():
                with contextlib.suppress(psutil.NoSuchProcess):
                    print(f"slimx: {process.name()} (process {process.pid}) is stopped: it is killed", flush=True)
                    if process.pid == owner:
                        process.kill()
                    else:
                        kill_at = 0.0
            look_at = time.monotonic() + LOOK_S
        orphaned = os.getppid() != owner
        if (asked or orphaned) and not told:
            os.kill(command.pid, signal.SIGTERM)  # not command.terminate(): that may reap it behind our back
            told = True
        if orphaned:
            kill_at = min(kill_at, time.monotonic() + ORPHAN_GRACE_S)
        if time.monotonic() > kill_at:
            kill_descendants(myself)
        time.sleep(POLL_S)
    kill_descendants(myself)
    for file in Path("/dev/shm").iterdir():
        with contextlib.suppress(FileNotFoundError):  # others come and go there too
            if file.stat().st_ino in shared:
                file.unlink()
    if temporary is not None:
        shutil.rmtree(temporary, ignore_errors=True)
    return status


def shared_memory_inodes(pid: int) -> set[int]:
    """Inodes in /dev/shm that descendants of `pid` have mapped: semaphores of multiprocessing above all.

    A killed process does not remove them, and its resource tracker cannot if it is killed too. By inode, because glibc
    maps a semaphore under a temporary name before it gives it its own.
    """
    found = set()
    for process in psutil.Process(pid).children(recursive=True):
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        except OSError:
            continue  # it has ended
        # address, permissions, offset, device, inode, path
        found |= {int(line.split()[4]) for line in maps.splitlines() if " /dev/shm/" in line}
    return found


def _reap(pid: int) -> int | None:
    """Collect all ended children (adopted ones too); the exit status of `pid` if it is among them."""
    status = None
    while True:
        try:
            ended, raw = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            # No child is left. If somebody else collected the command's status, there is still nothing to wait for.
            return 255 if status is None else status
        if ended == 0:
            return status
        if ended == pid:
            code = os.waitstatus_to_exitcode(raw)
            status = code if code >= 0 else 128 - code


class StopWatch:
    """Finds those that are stopped (as by SIGSTOP) among the descendants of a guard, and its owner if that is a worker
    of Ray: they never answer, and nothing says so to those that wait. A busy process is in another state, however long
    it is silent, and so is one that a debugger or a profiler holds."""

    def __init__(self, guard: int, owner: int):
        self._guard, self._owner = psutil.Process(guard), owner
        self._looks: Counter[psutil.Process] = Counter()

    def look(self) -> list[psutil.Process]:
        """Returns the processes that the last LOOKS looks found stopped.

        Looks are counted and not seconds: a guard that was stopped with all others has not looked meanwhile.
        """
        stopped = [process for process in self._watched() if _state(process) == psutil.STATUS_STOPPED]
        self._looks = Counter({process: self._looks[process] + 1 for process in stopped})
        return [process for process in stopped if self._looks[process] >= LOOKS]

    def _watched(self) -> list[psutil.Process]:
        watched = self._guard.children(recursive=True)
        try:
            raylet = psutil.Process(self._owner).parent()
            # Nothing starts another owner again, such as the driver; and with its raylet a whole run is stopped.
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
    parser = argparse.ArgumentParser(prog="python -m slimx.runtime.process", description=__doc__.splitlines()[0])
    parser.add_argument("--owner", type=int, required=True)
    parser.add_argument("--temporary", metavar="DIRECTORY")
    parser.add_argument("argv", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    sys.exit(guard(options.owner, options.argv[1:], options.temporary))
