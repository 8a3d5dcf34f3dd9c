"""The sandboxes that a server has leased to clients, the programs that run in them, and the images of new sandboxes."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slimx.errors import raised
from slimx.extras.boxes.programs.enclosure import MIB, ProgramResult
from slimx.extras.boxes.programs.watch import Limits
from slimx.extras.boxes.protocol import Box, BoxLost

UPLOADED = re.compile(r"sha256-[0-9a-f]{64}")
PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


@dataclass(slots=True)
class Lease:
    """Claim of a client on one sandbox, which exists or is being created."""

    made: asyncio.Future[Box]
    until: float
    """Time at which the lease expires, on the clock of `time.monotonic`."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock that serializes the calls to a sandbox, so that a client occupies at most one thread per sandbox."""
    runs: dict[str, LeasedRun] = field(default_factory=dict)
    """Program that was started last, by the name that the client chose for it; {} before the first start. Earlier
    programs are removed."""
    ending: asyncio.Task[None] | None = None


@dataclass(slots=True)
class LeasedRun:
    """One run of a program in a leased sandbox."""

    done: asyncio.Future[ProgramResult]
    stop: threading.Event = field(default_factory=threading.Event)


class Boxes:
    """All sandboxes of a server. Its methods run on the event loop; blocking calls to sandboxes run in threads."""

    def __init__(self, make: Callable[[str | Path, Limits], Box], *, most: int, lease_s: float):
        """Starts without sandboxes.

        `make`: function that creates a sandbox from a source and limits; it may block. `most`: maximum number of
        sandboxes that exist at once. `lease_s`: seconds after which an unused lease expires.
        """
        self._make = make
        self.most = most
        self.lease_s = lease_s
        self.leases: dict[str, Lease] = {}
        self.expired = 0
        """Number of sandboxes whose lease expired."""
        self.left = 0
        """Number of sandboxes that could not be removed and may have left files or processes behind."""
        self._tasks = set[asyncio.Task[None]]()
        self._threads = ThreadPoolExecutor(2 * most + 4, thread_name_prefix="slimx-boxes")

    @property
    def full(self) -> bool:
        return len(self.leases) >= self.most

    async def begin(self, name: str, source: str | Path, limits: Limits) -> Lease:
        """Returns the lease called `name`, and creates its sandbox if the lease is new.

        Raises the error with which the creation of the sandbox failed, or BoxLost if the sandbox is being removed.
        """
        lease = self.leases.get(name)
        if lease is not None and lease.ending is not None:
            raise BoxLost("the sandbox is being removed; create another sandbox", about=name)
        if lease is None:
            lease = Lease(asyncio.get_running_loop().create_future(), time.monotonic() + self.lease_s)
            self.leases[name] = lease
            self._task(self._begin(name, lease, source, limits))
        await asyncio.shield(lease.made)
        self.renew(lease)
        return lease

    async def call[T](self, lease: Lease, work: Callable[[Box], T]) -> T:
        """Runs `work` with the sandbox in a thread, after earlier calls to the same sandbox, and returns its result."""
        box = await asyncio.shield(lease.made)
        async with lease.turn:
            self.renew(lease)
            try:
                return await self._in_thread(work, box)
            finally:
                self.renew(lease)

    def start(self, lease: Lease, name: str, program: Callable[[Box, threading.Event], ProgramResult]) -> None:
        """Starts `program` under `name`. Does nothing if the sandbox's latest program was started under this name,
        because the call is then a retry."""
        if name in lease.runs:
            return
        run = LeasedRun(asyncio.get_running_loop().create_future())
        lease.runs.clear()
        lease.runs[name] = run

        async def work() -> None:
            try:
                run.done.set_result(await self.call(lease, lambda box: program(box, run.stop)))
            except BaseException as error:
                _fail(run.done, error)

        self._task(work())

    def renew(self, lease: Lease) -> None:
        lease.until = time.monotonic() + self.lease_s

    async def end(self, name: str) -> None:
        """Stops the program of the sandbox called `name` and removes the sandbox, if it exists. The sandbox counts
        towards the maximum until it has been removed."""
        lease = self.leases.get(name)
        if lease is not None:
            await asyncio.shield(self._ending(name, lease))

    async def watch(self) -> None:
        """Removes sandboxes whose lease has expired; runs until it is cancelled."""
        while True:
            await asyncio.sleep(min(1.0, self.lease_s / 4))
            for name, lease in self.leases.items():
                if lease.made.done() and lease.ending is None and time.monotonic() > lease.until:
                    self.expired += 1
                    print(
                        f"sandbox {name[:8]}: removed, because its client sent nothing for {self.lease_s:g} s",
                        flush=True,
                    )
                    self._ending(name, lease)

    async def close(self) -> None:
        await asyncio.gather(*(self.end(name) for name in list(self.leases)))
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def _begin(self, name: str, lease: Lease, source: str | Path, limits: Limits) -> None:
        try:
            box = await asyncio.get_running_loop().run_in_executor(self._threads, self._make, source, limits)
        except BaseException as error:
            self.leases.pop(name, None)
            _fail(lease.made, error)
            return
        self.renew(lease)
        lease.made.set_result(box)

    def _ending(self, name: str, lease: Lease) -> asyncio.Task[None]:
        """Starts removing a sandbox, unless its removal has already started, and returns the task that removes it."""
        if lease.ending is None:
            lease.ending = self._task(self._end(name, lease))
        return lease.ending

    async def _end(self, name: str, lease: Lease) -> None:
        for run in lease.runs.values():
            run.stop.set()
        try:
            await asyncio.wait({lease.made})
            if lease.made.exception() is None:  # otherwise no sandbox was created
                await self._in_thread(lambda box: box.end(), lease.made.result())
        except Exception as error:
            self.left += 1
            print(f"sandbox {name[:8]}: could not be removed ({raised(error)})", flush=True)
        finally:
            self.leases.pop(name, None)

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a task and keeps a reference to it, because asyncio keeps only a weak one."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _in_thread[T](self, work: Callable[[Box], T], box: Box) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, box)


def _fail[T](future: asyncio.Future[T], error: BaseException) -> None:
    """Sets the exception of a future and retrieves it, because asyncio logs exceptions that are never retrieved."""
    future.set_exception(error if isinstance(error, Exception) else RuntimeError(type(error).__name__))
    future.exception()


@dataclass(frozen=True, slots=True)
class Images:
    """Images of a server: those in a directory, and archives that clients uploaded, which are named by their
    digests."""

    named: Path | None
    """Directory of the archives and root directories that clients may request by name; None if there are none."""
    uploads: Path
    uploads_mib: int
    """Maximum size of all uploaded archives together, in MiB; the least recently used ones are removed first."""

    def find(self, name: str) -> Path | None:
        """Returns the archive or directory called `name`; None if there is none."""
        if UPLOADED.fullmatch(name):
            path = self.uploads / name
        elif self.named is not None and PLAIN.fullmatch(name):
            path = self.named / name
        else:
            return None
        if not path.exists():
            return None
        if path.parent == self.uploads:
            os.utime(path)
        return path

    def fits(self, size: int) -> bool:
        """Returns True if an archive of `size` bytes may be uploaded."""
        return size <= self.uploads_mib * MIB

    def make_room(self, size: int) -> None:
        """Removes the least recently used archives until an archive of `size` bytes fits."""
        most = self.uploads_mib * MIB
        archives = sorted((path.stat().st_mtime, path) for path in self.uploads.glob("sha256-*"))
        sizes = {path: path.stat().st_size for _, path in archives}
        for _, oldest in archives:
            if sum(sizes.values()) + size <= most:
                break
            oldest.unlink(missing_ok=True)
            del sizes[oldest]


def limits_within(requested: Mapping[str, Any], maximum: Limits) -> Limits:
    """Returns a copy of `maximum` in which the limits that a client requests replace the server's.

    Raises ValueError if a name or value is not valid for a limit, or exceeds the server's maximum.
    """
    names = {limit.name for limit in dataclasses.fields(maximum)}
    for name, value in requested.items():
        if name not in names or isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ValueError(
                f"the limit {name}={value!r} is unknown or not above 0; request limits that the server's --help lists"
            )
        if value > getattr(maximum, name):
            raise ValueError(
                f"the limit {name}={value:g} exceeds the server's maximum of {getattr(maximum, name):g}; lower the "
                "limit, or raise the server's option of the same name"
            )
    return dataclasses.replace(maximum, **requested)
