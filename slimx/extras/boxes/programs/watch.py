"""Watches one run in the sandbox: feeds it, reads it, and ends it at a limit."""

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

from slimx.data.whole import as_whole
from slimx.errors import SlimxError
from slimx.extras.boxes.programs.memory_group import MemoryGroup

Ended = Literal["exit", "time", "memory", "disk", "output", "stop"]
LOOK_S = 0.05
"""Between two looks at the memory of all processes together."""
STOP_S = 5.0
"""Seconds for a process to stop, or to end after the one it waits for."""
MIB = 2**20
Whole = Annotated[int, Meta(gt=0)]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one run of code."""

    seconds: Annotated[float, Meta(gt=0)] = 10.0
    """Wall clock."""
    memory_mib: Whole = 512
    """Address space of each process, and memory of all together."""
    processes: Whole = 8
    """Besides the first one; threads count."""
    disk_mib: Whole = 16
    """All files that it may write together: in memory in a sandbox's /tmp, on disk in a box."""
    output_kib: Whole = 64
    """KiB kept of stdout and of stderr, each."""

    def __post_init__(self) -> None:
        for each in fields(self):
            if isinstance(each.default, int):
                value = as_whole(getattr(self, each.name))
                if not isinstance(value, int):
                    raise SlimxError(
                        f"{each.name} of a sandbox or a box is {value!r}; give a whole number",
                        code="sandbox.limit",
                        about=each.name,
                    )
                object.__setattr__(self, each.name, value)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left. With the first process of a process name space, bubblewrap's child, the kernel ends all others
    in it. bubblewrap is stopped meanwhile: killed alone it may leave a child that it has just begun."""
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
            if children:  # it ends by itself once it has seen the end of its child
                outer.resume()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_S)
        process.kill()
    process.wait()


class SandboxWatch:
    """Feeds a process and reads it until it ends or meets a limit."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        limits: Limits,
        started: float,
        told: int | None,
        group: MemoryGroup | None = None,
        go: int | None = None,
        stop: threading.Event | None = None,
        disk_used: Callable[[int], int] | None = None,
    ):
        """`told`: the descriptor that bubblewrap reports on, where it is what runs. `group`: where the processes
        belong; bubblewrap waits for a byte on `go` until they are there. `stop`: ends it. `disk_used`: bytes on disk,
        by the process's number."""
        self.process, self.limits, self.group, self._go, self._stop = process, limits, group, go, stop
        self._disk_used = disk_used
        self.deadline = started + limits.seconds
        self.read = {"stdout": bytearray(), "stderr": bytearray(), "told": bytearray()}
        self._streams = {"stdout": process.stdout, "stderr": process.stderr, "told": told}

    def exit_status(self) -> int | None:
        """The code's exit status, 128 + signal number if a signal ended it; None if it has not run, or not ended."""
        return next((said["exit-code"] for said in self._told() if "exit-code" in said), None)

    def until_the_end(self, stdin: bytes) -> Ended:
        rest, look, look_at_disk = memoryview(stdin), time.monotonic(), time.monotonic()
        with selectors.DefaultSelector() as ready:
            for name, stream in self._streams.items():
                if stream is not None:
                    ready.register(stream, selectors.EVENT_READ, name)
            if self.process.stdin is not None:
                ready.register(self.process.stdin, selectors.EVENT_WRITE, "stdin")
                os.set_blocking(self.process.stdin.fileno(), False)
            while ready.get_map():
                now = time.monotonic()
                if now > self.deadline:
                    return "time"
                if self._stop is not None and self._stop.is_set():
                    return "stop"
                if now > look:
                    if self._memory() > self.limits.memory_mib * MIB or self._overflowed():
                        return "memory"
                    look = now + LOOK_S
                if self._disk_used is not None and now > look_at_disk:
                    if self._disk_full():
                        return "disk"
                    # A large tree takes long to count: at most a fifth of the time goes into it.
                    look_at_disk = time.monotonic() + max(LOOK_S, 4 * (time.monotonic() - now))
                for key, _ in ready.select(min(LOOK_S, max(0.0, self.deadline - now))):
                    if key.data == "stdin":
                        rest = self._feed(rest)
                        if rest is None:
                            ready.unregister(key.fileobj)
                            key.fileobj.close()
                    elif piece := os.read(key.fd, 65536):
                        self.read[key.data] += piece
                        if key.data == "told":
                            self._begin()
                        elif len(self.read[key.data]) > self.limits.output_kib * 1024:
                            del self.read[key.data][self.limits.output_kib * 1024 :]
                            return "output"
                    else:
                        ready.unregister(key.fileobj)
        try:
            self.process.wait(max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return "time"
        if self._overflowed():
            return "memory"
        return "disk" if self._disk_full() else "exit"

    def _told(self) -> list[dict[str, int]]:
        """Reports of bubblewrap so far, of whole lines; nothing inside holds the descriptor that they come from."""
        return [json.loads(line) for line in self.read["told"].split(b"\n")[:-1] if line]

    def _begin(self) -> None:
        """Put the processes into their group once the one inside is known, and let them go on."""
        child = next((said["child-pid"] for said in self._told() if "child-pid" in said), None)
        if self.group is None or self._go is None or child is None:
            return
        for pid in (self.process.pid, child):
            self.group.take(pid)
        os.write(self._go, b"g")
        self._go = None

    def _overflowed(self) -> bool:
        return self.group is not None and self.group.overflowed()

    def _disk_full(self) -> bool:
        return self._disk_used is not None and self._disk_used(self.process.pid) > self.limits.disk_mib * MIB

    def _feed(self, rest: memoryview) -> memoryview | None:
        """Remaining bytes to write; None when there are none, or nobody reads them."""
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
