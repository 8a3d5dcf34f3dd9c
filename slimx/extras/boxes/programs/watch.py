"""Supervises one program in the sandbox: writes its input, reads its output, and enforces its limits."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Literal

import psutil
from msgspec import Meta

from slimx.data.integers import as_whole
from slimx.errors import SlimxError
from slimx.extras.boxes.programs.memory_group import MemoryGroup

Ended = Literal["exit", "time", "memory", "disk", "output", "stop"]
LOOK_S = 0.05
"""Interval in seconds at which the total memory of all processes is checked."""
STOP_S = 5.0
"""Maximum time in seconds to wait for a process to be suspended, or to exit after its child."""
MIB = 2**20
Whole = Annotated[int, Meta(gt=0)]


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits for one program in a sandbox."""

    seconds: Annotated[float, Meta(gt=0)] = 10.0
    """Maximum wall-clock time in seconds."""
    memory_mib: Whole = 512
    """Limit in MiB on the address space of each process, and on the memory of all processes together."""
    processes: Whole = 8
    """Maximum number of processes and threads in addition to the program's first process."""
    disk_mib: Whole = 16
    """Maximum size of all files that the program writes, in MiB: in memory for the /tmp of a `Sandbox`, on disk for a
    `Box`."""
    output_kib: Whole = 64
    """Maximum size of stdout in KiB, and likewise of stderr."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            if isinstance(limit.default, int):
                value = as_whole(getattr(self, limit.name))
                if not isinstance(value, int):
                    raise SlimxError(
                        f"the sandbox limit {limit.name} must be an integer, not {value!r}; set a whole number, such "
                        f"as {limit.default}",
                        code="sandbox.limit",
                        about=limit.name,
                    )
                object.__setattr__(self, limit.name, value)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kills the remaining processes of a program.

    Killing bubblewrap's child, the first process of the process namespace, makes the kernel kill all other processes in
    it. bubblewrap is suspended meanwhile, because killing it alone could leave a child that it has just started.
    """
    if process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            outer = psutil.Process(process.pid)
            outer.suspend()
            until = time.monotonic() + STOP_S
            while outer.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE) and time.monotonic() < until:
                time.sleep(0.001)
            children = outer.children()
            for first in children:
                first.kill()
            if children:  # bubblewrap exits once it has reaped its child
                outer.resume()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_S)
        process.kill()
    process.wait()


class SandboxWatch:
    """Supervisor that feeds a process its input and collects its output until the process exits or reaches a limit."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        limits: Limits,
        started: float,
        *,
        status_fd: int | None = None,
        group: MemoryGroup | None = None,
        go: int | None = None,
        stop: threading.Event | None = None,
        disk_used: Callable[[int], int] | None = None,
    ):
        """Watches a process that was started at the time `started`, on the clock of `time.monotonic`.

        `status_fd`: descriptor from which bubblewrap's status is read, if the process is bubblewrap. `group`: memory
        group for the processes. `go`: descriptor from which bubblewrap awaits a byte, sent once the processes belong to
        `group`. `stop`: event that stops the program when set. `disk_used`: function that returns the number of bytes
        used on disk, given the process id.
        """
        self.process = process
        self.limits = limits
        self.group = group
        self._go = go
        self._stop = stop
        self._disk_used = disk_used
        self.deadline = started + limits.seconds
        self.read = {"stdout": bytearray(), "stderr": bytearray(), "status": bytearray()}
        self._streams = {"stdout": process.stdout, "stderr": process.stderr, "status": status_fd}
        self._unwritten = memoryview(b"")
        self._next_look = time.monotonic()
        self._next_disk_look = self._next_look

    def exit_status(self) -> int | None:
        """Returns the exit status, or 128 + signal number if a signal killed the program; None if it did not run or has
        not exited."""
        return self._reported("exit-code")

    def until_the_end(self, stdin: bytes) -> Ended:
        """Writes `stdin` to the process and reads its output until it exits or reaches a limit. Returns the reason why
        it ended."""
        self._unwritten = memoryview(stdin)
        max_output = self.limits.output_kib * 1024
        with selectors.DefaultSelector() as selector:
            for name, stream in self._streams.items():
                if stream is not None:
                    selector.register(stream, selectors.EVENT_READ, name)
            if self.process.stdin is not None:
                selector.register(self.process.stdin, selectors.EVENT_WRITE, "stdin")
                os.set_blocking(self.process.stdin.fileno(), False)
            while selector.get_map():
                now = time.monotonic()
                reached = self._reached_limit(now)
                if reached is not None:
                    return reached
                for key, _ in selector.select(min(LOOK_S, max(0.0, self.deadline - now))):
                    if key.data == "stdin":
                        finished = self._write()
                    else:
                        finished = self._read(key.fd, key.data)
                        if key.data != "status" and len(self.read[key.data]) > max_output:
                            del self.read[key.data][max_output:]
                            return "output"
                    if finished:
                        selector.unregister(key.fileobj)
                        if key.data == "stdin" and self.process.stdin is not None:
                            self.process.stdin.close()
        try:
            self.process.wait(max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return "time"
        if self._overflowed():
            return "memory"
        return "disk" if self._disk_full() else "exit"

    def _reached_limit(self, now: float) -> Ended | None:
        if now > self.deadline:
            return "time"
        if self._stop is not None and self._stop.is_set():
            return "stop"
        if now > self._next_look:
            if self._memory() > self.limits.memory_mib * MIB or self._overflowed():
                return "memory"
            self._next_look = now + LOOK_S
        if self._disk_used is not None and now > self._next_disk_look:
            if self._disk_full():
                return "disk"
            # A large tree takes long to count, so counting may take at most a fifth of the time.
            counted = time.monotonic()
            self._next_disk_look = counted + max(LOOK_S, 4 * (counted - now))
        return None

    def _reported(self, key: str) -> int | None:
        """Returns the value of `key` in bubblewrap's status, which consists of lines of JSON; None if bubblewrap has
        not reported it yet. The program cannot write to this status, because it does not have the descriptor."""
        for line in self.read["status"].split(b"\n")[:-1]:
            if line:
                report = json.loads(line)
                if key in report:
                    return report[key]
        return None

    def _begin(self) -> None:
        """Moves the processes into their memory group once bubblewrap has reported its child, and lets them
        continue."""
        child = self._reported("child-pid")
        if self.group is None or self._go is None or child is None:
            return
        for pid in (self.process.pid, child):
            self.group.take(pid)
        os.write(self._go, b"g")
        self._go = None

    def _read(self, fd: int, name: str) -> bool:
        """Reads available output from the stream `name`, whose descriptor is `fd`. Returns True at the end of the
        stream."""
        piece = os.read(fd, 65536)
        self.read[name] += piece
        if piece and name == "status":
            self._begin()
        return not piece

    def _overflowed(self) -> bool:
        return self.group is not None and self.group.overflowed()

    def _disk_full(self) -> bool:
        return self._disk_used is not None and self._disk_used(self.process.pid) > self.limits.disk_mib * MIB

    def _write(self) -> bool:
        """Writes to stdin; returns True if nothing remains to be written, or if the process has closed its end of the
        pipe."""
        assert self.process.stdin is not None
        if not self._unwritten:
            return True
        try:
            written = os.write(self.process.stdin.fileno(), self._unwritten[:65536])
        except BlockingIOError:
            return False
        except BrokenPipeError:
            return True
        self._unwritten = self._unwritten[written:]
        return not self._unwritten

    def _memory(self) -> int:
        """Returns the resident memory of all processes in the sandbox, in bytes."""
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
