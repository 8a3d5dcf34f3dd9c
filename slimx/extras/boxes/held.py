"""The boxes that a server has given away: their leases, the programs that run in them, and the images of new ones."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slimx.errors import raised
from slimx.extras.boxes.programs.enclosure import MIB, Ran
from slimx.extras.boxes.protocol import Box, BoxLost

UPLOADED = re.compile(r"sha256-[0-9a-f]{64}")
PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


@dataclass(slots=True)
class Held:
    """One box that a client has, or is to have."""

    made: asyncio.Future[Box]
    until: float
    """Its lease runs out then, by the monotonic clock."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Calls of one box come one by one, so that a client occupies one thread at most for each box."""
    runs: dict[str, Run] = field(default_factory=dict)
    """The newest program, by the name that the client gave it."""
    ending: asyncio.Task[None] | None = None


@dataclass(slots=True)
class Run:
    """One program."""

    done: asyncio.Future[Ran]
    stop: threading.Event = field(default_factory=threading.Event)


class Boxes:
    """All boxes of a server. Its methods belong to the event loop; boxes are worked on in threads."""

    def __init__(self, make: Callable[[str | Path, Any], Box], *, most: int, lease_s: float):
        """`make`: a box from a source and limits, which may block. `most`: boxes at once."""
        self._make, self.most, self.lease_s = make, most, lease_s
        self.held: dict[str, Held] = {}
        self.expired = 0
        """Boxes whose lease ran out."""
        self.left = 0
        """Boxes whose end has failed, so that something of them may be left."""
        self._tasks = set[asyncio.Task[None]]()
        self._threads = ThreadPoolExecutor(2 * most + 4, thread_name_prefix="slimx-boxes")

    @property
    def full(self) -> bool:
        return len(self.held) >= self.most

    async def begin(self, name: str, source: str | Path, limits: Any) -> Held:
        """The box of this name, made now or before. Raises what making it raised, BoxLost for one that is ended."""
        held = self.held.get(name)
        if held is not None and held.ending is not None:
            raise BoxLost("the box is being ended", about=name)
        if held is None:
            held = Held(asyncio.get_running_loop().create_future(), time.monotonic() + self.lease_s)
            self.held[name] = held
            self._task(self._begin(name, held, source, limits))
        await asyncio.shield(held.made)
        self.renew(held)
        return held

    async def call[T](self, held: Held, work: Callable[[Box], T]) -> T:
        """Have a thread work on the box, after the calls that came before."""
        box = await asyncio.shield(held.made)
        async with held.turn:
            self.renew(held)
            try:
                return await self._in_thread(work, box)
            finally:
                self.renew(held)

    def start(self, held: Held, name: str, run: Callable[[Box, threading.Event], Ran]) -> None:
        """Start a program, unless it has been before."""
        if name in held.runs:
            return
        held.runs.clear()
        made = held.runs[name] = Run(asyncio.get_running_loop().create_future())

        async def work() -> None:
            try:
                made.done.set_result(await self.call(held, lambda box: run(box, made.stop)))
            except BaseException as error:
                made.done.set_exception(error if isinstance(error, Exception) else RuntimeError(type(error).__name__))
                made.done.exception()  # read, so that asyncio does not tell of one that nobody asks for

        self._task(work())

    def renew(self, held: Held) -> None:
        held.until = time.monotonic() + self.lease_s

    async def end(self, name: str) -> None:
        """End a box and what runs in it; one that is not there has ended. It keeps its place until it has."""
        held = self.held.get(name)
        if held is not None:
            await asyncio.shield(self._ending(name, held))

    async def watch(self) -> None:
        """End boxes whose lease has run out, for ever."""
        while True:
            await asyncio.sleep(min(1.0, self.lease_s / 4))
            for name, held in self.held.items():
                if held.made.done() and held.ending is None and time.monotonic() > held.until:
                    self.expired += 1
                    print(f"box {name[:8]}: its client has sent nothing for {self.lease_s:g} s; ended", flush=True)
                    self._ending(name, held)

    async def close(self) -> None:
        await asyncio.gather(*(self.end(name) for name in list(self.held)))
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def _begin(self, name: str, held: Held, source: str | Path, limits: Any) -> None:
        try:
            box = await asyncio.get_running_loop().run_in_executor(self._threads, self._make, source, limits)
        except BaseException as error:
            self.held.pop(name, None)
            held.made.set_exception(error if isinstance(error, Exception) else RuntimeError(type(error).__name__))
            held.made.exception()
            return
        self.renew(held)
        held.made.set_result(box)

    def _ending(self, name: str, held: Held) -> asyncio.Task[None]:
        """The end of a box, begun once."""
        if held.ending is None:
            held.ending = self._task(self._end(name, held))
        return held.ending

    async def _end(self, name: str, held: Held) -> None:
        for run in held.runs.values():
            run.stop.set()
        try:
            await asyncio.wait({held.made})
            if held.made.exception() is None:  # else there is none to end
                await self._in_thread(lambda box: box.end(), held.made.result())
        except Exception as error:
            self.left += 1
            print(f"box {name[:8]}: it could not be ended ({raised(error)})", flush=True)
        finally:
            self.held.pop(name, None)

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin a piece of work, and hold it: asyncio does not."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _in_thread[T](self, work: Callable[[Box], T], box: Box) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, box)


@dataclass(frozen=True, slots=True)
class Images:
    """Images of a server: those of a directory, and archives that clients have sent, by their digest."""

    named: Path | None
    """Directory of archives and root directories that clients may name."""
    uploads: Path
    uploads_mib: int
    """MiB of all archives that were sent; the one that was used longest ago goes first."""

    def find(self, name: str) -> Path | None:
        """The archive or directory of a name; None where there is none."""
        if UPLOADED.fullmatch(name):
            found = self.uploads / name
        elif self.named is not None and PLAIN.fullmatch(name):
            found = self.named / name
        else:
            return None
        if not found.exists():
            return None
        if found.parent == self.uploads:
            os.utime(found)
        return found

    def fits(self, size: int) -> bool:
        """True if an archive of `size` bytes may be sent."""
        return size <= self.uploads_mib * MIB

    def make_room(self, size: int) -> None:
        """Remove the archives that were used longest ago until `size` bytes fit."""
        most = self.uploads_mib * MIB
        held = sorted(((each.stat().st_mtime, each) for each in self.uploads.glob("sha256-*")), reverse=True)
        sizes = {each: each.stat().st_size for _, each in held}
        while held and sum(sizes.values()) + size > most:
            _, oldest = held.pop()
            oldest.unlink(missing_ok=True)
            del sizes[oldest]


def limits_within(asked: dict[str, Any], most: Any) -> Any:
    """Limits as a client asks for them. Raises ValueError for one above the server's, or that is no number."""
    names = {each.name for each in dataclasses.fields(most)}
    for name, value in asked.items():
        if name not in names or isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"{name} {value!r} is no limit")
        if value > getattr(most, name):
            raise ValueError(f"{name} {value:g} is above the {getattr(most, name):g} of the server")
    return dataclasses.replace(most, **asked)
