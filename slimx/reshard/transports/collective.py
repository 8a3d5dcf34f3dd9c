"""Buckets over gloo or NCCL: one process group per engine, so that an engine that dies takes no other group along.

    publisher (rank 0)  Sending.open -> meeting ... join -> broadcast -> close
    engine rank r - 1   Receiving.join(meeting, r)       -> receive   -> close

Each group has a store, a port and a name of its own, with the membership epoch in it: a rank that comes late, from an
engine that was replaced meanwhile, finds nobody to join. The groups are built beside torch.distributed's default group,
which neither side needs. gloo moves host memory, NCCL the memory of each side's first GPU. What a channel delivers is
not trusted: the receiver compares checksums before it uses it.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from slimx.errors import SlimxError
from slimx.reshard.transports.meeting import listen, serve
from slimx.runtime.ports import family

Backend = Literal["gloo", "nccl"]
PUBLISHER = 0
CHUNK = 256 * 2**20
"""Bytes of one operation: gloo counts in 32 bits."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """The meeting place of one engine's group, as the publisher tells it to the engine's ranks."""

    engine: str
    epoch: int
    """Membership epoch in which the engine joined."""
    host: str
    port: int
    """Port of the group's store, at the publisher."""
    ranks: int
    """Receiving ranks; they are 1 to `ranks` in the group."""
    backend: Backend
    deadline_s: float
    """Seconds for the meeting, and for each operation after it."""

    def __str__(self) -> str:
        return f"the {self.backend} channel of engine {self.engine} (epoch {self.epoch})"


class ChannelError(SlimxError):
    """A group whose other side died, or did not answer in time. It is of no use any more: close it."""


class _Channel:
    """One side of one engine's group."""

    def __init__(self, meeting: Meeting, rank: int, store: dist.Store, own_host: str):
        self.meeting, self.rank = meeting, rank
        prefix = dist.PrefixStore(f"slimx/{meeting.engine}/{meeting.epoch}", store)
        timeout = timedelta(seconds=meeting.deadline_s)
        self._group: Any = None
        self._group = self._checked(
            "the meeting", lambda: _make_group(prefix, rank, meeting.ranks + 1, meeting.backend, timeout, own_host)
        )
        self._timeout = timeout

    def close(self) -> None:
        """Leave the group; what the other side waits for fails."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()  # an operation that is under way on a GPU would stay there

    def broadcast(self, data: torch.Tensor) -> None:
        """Bring `data`, uint8 [n], from the publisher to every rank of the engine; all of them call this."""
        for start in range(0, len(data), CHUNK):
            if self._group is None:
                raise ChannelError(
                    f"{self.meeting} is closed; a broadcast needs a new one",
                    code="channel.closed",
                    about=self.meeting.engine,
                )
            part = [data[start : start + CHUNK]]
            self._checked("a broadcast", lambda part=part: self._group.broadcast(part, _all()).wait(self._timeout))

    def _checked(self, what: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except RuntimeError as error:  # what torch raises for a dead peer and for a deadline alike
            self.close()
            first = str(error).strip().partition("\n")[0][:300]
            raise ChannelError(
                f"{self.meeting}: {what} failed on rank {self.rank} of {self.meeting.ranks + 1}: {first}",
                code="channel.broken",
                about=self.meeting.engine,
            ) from None


class Sending(_Channel):
    """The publisher's side."""

    @staticmethod
    def open(engine: str, epoch: int, *, ranks: int, host: str, backend: Backend, deadline_s: float) -> Opening:
        """Open a meeting at `host`, an address of this machine; its ranks join next, on both sides at once."""
        listener = listen(host)
        port = listener.getsockname()[1]
        store = serve(listener, timedelta(seconds=deadline_s))
        return Opening(Meeting(engine, epoch, host, port, ranks, backend, deadline_s), store)


@dataclass(frozen=True, slots=True)
class Opening:
    """A meeting that the publisher has opened and waits at."""

    meeting: Meeting
    store: dist.Store

    def join(self) -> Sending:
        """Wait for the engine's ranks. Raises ChannelError if they do not come in time."""
        return Sending(self.meeting, PUBLISHER, self.store, self.meeting.host)


class Receiving(_Channel):
    """The side of one engine rank."""

    @classmethod
    def join(cls, meeting: Meeting, rank: int) -> Receiving:
        """Join as the engine's `rank`, counted from 0. Raises ChannelError if the meeting is over."""
        try:
            store = dist.TCPStore(
                meeting.host,
                meeting.port,
                is_master=False,
                timeout=timedelta(seconds=meeting.deadline_s),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            first = str(error).partition("\n")[0][:300]
            raise ChannelError(
                f"{meeting} has no meeting at {meeting.host}:{meeting.port}: {first}",
                code="channel.no_meeting",
                about=meeting.engine,
            ) from None
        return cls(meeting, rank + 1, store, _own_address(meeting.host, meeting.port))

    def receive(self, data: torch.Tensor) -> torch.Tensor:
        """Fill `data`, uint8 [n], with what the publisher broadcasts."""
        self.broadcast(data)
        return data


def _make_group(
    store: dist.Store, rank: int, size: int, backend: Backend, timeout: timedelta, own_host: str
) -> dist.ProcessGroup:
    store.set_timeout(timeout)
    # All say that they are here before any connects: NCCL waits for one that is absent without a deadline.
    store.set(f"rank {rank}", "here")
    store.wait([f"rank {other}" for other in range(size)], timeout)
    if backend == "gloo":
        options = dist.ProcessGroupGloo._Options()
        # By address: torch would look up the machine's own name, which need not resolve.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_host)]
        options._timeout = timeout
        return dist.ProcessGroupGloo(store, rank, size, options)
    return _make_nccl_group(store, rank, size, timeout)


def _make_nccl_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """A group on this process's first GPU, with its communicator."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    with _WAITS.until_done():
        group = dist.ProcessGroupNCCL(store, rank, size, options)
    # NCCL connects in the first operation; what can go wrong then belongs to the meeting.
    group.broadcast([torch.zeros(1, dtype=torch.uint8, device=torch.device("cuda", 0))], _all()).wait(timeout)
    return group


def _all() -> dist.BroadcastOptions:
    """Options of a broadcast by the publisher."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = PUBLISHER, 0
    return options


class _Waits:
    """torch's own variable by which a group of NCCL waits until an operation has ended on the device, or its deadline
    has passed, and raises. Otherwise a watchdog ends this whole process for one lost engine. Only the constructor of a
    group reads it, so that it is set no longer: a server that this process starts must not inherit it."""

    VARIABLE = "TORCH_NCCL_BLOCKING_WAIT"

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def until_done(self) -> Iterator[None]:
        with self._lock:
            before = os.environ.get(self.VARIABLE)
            os.environ[self.VARIABLE] = "1"
            try:
                yield
            finally:
                if before is None:
                    del os.environ[self.VARIABLE]
                else:
                    os.environ[self.VARIABLE] = before


_WAITS = _Waits()


def _own_address(host: str, port: int) -> str:
    """This machine's address on the way to `host`. Nothing is sent."""
    with socket.socket(family(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]
