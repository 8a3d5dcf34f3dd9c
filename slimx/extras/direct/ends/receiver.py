"""An engine's end of direct transfers: memory that trainer ranks write into, and buckets made of what came."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from slimx.extras.direct import SLOTS
from slimx.extras.direct.ends.agent import Agent, LinkError, current, region_of
from slimx.extras.direct.ends.copies import in_flight
from slimx.extras.direct.ends.deltas import Held
from slimx.extras.direct.ends.offer import Notice, Offer, arrivals
from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.kernels import cuda as kernel_cuda
from slimx.reshard.kernels.cuda import DevicePlan
from slimx.reshard.pack.pieces import PlannedBuckets, pieces_of, spread
from slimx.reshard.packed import PackedBucket
from slimx.reshard.plan.copy_plan import Plan
from slimx.reshard.transports.device import DeviceMemory
from slimx.reshard.transports.memory import MemoryFile

LOOK_S = 0.001
"""Seconds between two looks at the notices that have come."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """The transfers that an engine will get."""

    name: str
    """Name of its agent, another one for each start of the engine."""
    parts: tuple[bytes, ...]
    """By rank the plan of what it takes."""
    deadline_s: float
    """Seconds in which a bucket must have come."""
    item: int = 0
    """Bytes of an element where changes travel (`publish.delta`), 0 where whole runs do."""
    gpu: int | None = None
    """Number, in the receiver's process, of the GPU in whose memory it takes them; None: host memory."""


class Receiver:
    """Memory for ranks of one engine on one machine: the host's for all of them, or a GPU's for the one that is there.
    `landed` is called for one bucket after the other."""

    def __init__(self, invitation: Invitation, host: str):
        """`host`: address of this machine."""
        parts = [Plan.from_bytes(part) for part in invitation.parts]
        self.name, self.deadline_s, self.item = invitation.name, invitation.deadline_s, invitation.item
        self._parts = [PlannedBuckets(part) for part in parts]
        self._runs, room = arrivals(parts, self.item)
        self._held = Held(self.item, parts[0].count) if self.item else None
        self.agent = Agent(self.name, host)
        self._slots = [
            self.agent.register(room) if invitation.gpu is None else self.agent.register_gpu(room, invitation.gpu)
            for _ in range(min(SLOTS, parts[0].count))
        ]
        self._landing: DeviceMemory | None = None
        """Memory of a GPU that buckets are made in, one after the other."""
        self._come: dict[tuple[int, int], set[int]] = {}
        """By transfer and bucket the trainer ranks whose bytes are here."""
        self._copies: dict[tuple[int, int], np.ndarray | None] = {}
        """By rank and bucket the records that put what came where the tensors are."""
        self._closed = threading.Event()
        self._lock = threading.Lock()
        """Guards the agent and its memory: `close` may come from another thread than the one in `landed`."""

    def offer(self) -> Offer:
        slots = tuple(map(region_of, self._slots))
        return Offer(self.name, self.agent.metadata, slots, tuple(self._runs), self.item)

    def bases(self) -> list[int]:
        """By bucket the number of the transfer whose bytes are held, to which changes can be applied; 0: none are."""
        return [] if self._held is None else list(self._held.bases)

    @contextmanager
    def landed(self, packed: PackedBucket) -> Iterator[PackedBucket]:
        """A bucket, with the tensors of the ranks here, once it has come, for the time of the block: each rank's part
        in memory of its own. Whoever has opened the host's keeps it beyond the block; a GPU's is the next bucket's.

        Raises LinkError naming the trainer ranks whose bytes have not come in time, and once this is closed.
        """
        transfer, bucket = in_flight(packed)
        with self._opened() as slots:
            first = slots[0]
        with current(first):
            self._wait(transfer, bucket)
        forms = [part.form(bucket) for part in self._parts]
        # A server is told one size, that of its largest rank; host memory that nobody writes to takes none.
        size, files = packed.size, []
        try:
            with self._opened() as slots:
                if self._held is not None:
                    runs = [run for run in self._runs if run.bucket == bucket]
                    self._held.take(self.name, bucket, transfer, runs, slots[bucket % len(slots)])
                for rank in range(len(forms)):
                    files.append(self._place(size))
                    self._put(rank, bucket, files[rank])
            targets = tuple(
                tuple(replace(t, offset=int(offset)) for t, offset in zip(target, form.offset, strict=True))
                for target, form in zip(packed.targets, forms, strict=True)
            )
            yield PackedBucket(files[0].path, size, targets, tuple(file.path for file in files[1:]))
        finally:
            for file in files:
                if isinstance(file, MemoryFile):
                    file.close()

    def close(self) -> None:
        """Give the memory back; a wait under way ends, and what is copied out of it is waited for."""
        self._closed.set()
        with self._lock:
            self._slots.clear()
            self.agent.close()
            if self._landing is not None:
                self._landing.close()
                self._landing = None

    @contextmanager
    def _opened(self) -> Iterator[list[Any]]:
        """The memory, which nobody gives back inside the block. Raises LinkError once it has been given back."""
        with self._lock:
            if self._closed.is_set():
                raise self._has_closed()
            yield self._slots

    def _has_closed(self) -> LinkError:
        return LinkError(f"{self.name} has been closed", code="direct.closed", about=self.name)

    def _wait(self, transfer: int, bucket: int) -> None:
        runs = [run for run in self._runs if run.bucket == bucket]
        wanted = {run.source for run in runs}
        ends = time.monotonic() + self.deadline_s
        while True:
            for data in self._notices():
                if (notice := Notice.from_bytes(data)) is not None:
                    self._come.setdefault((notice.transfer, notice.bucket), set()).add(notice.source)
            # What belongs to an older publication, or to a bucket before, came too late for anybody.
            self._come = {key: come for key, come in self._come.items() if key >= (transfer, bucket)}
            missing = wanted - self._come.get((transfer, bucket), set())
            if not missing:
                return
            if time.monotonic() > ends:
                lacking = sum(run.nbytes for run in runs if run.source in missing)
                total = sum(run.nbytes for run in runs)
                raise LinkError(
                    f"{self.name}: of bucket {bucket} {lacking} of {total} bytes have not come within "
                    f"{self.deadline_s:.0f} s, those of trainer ranks {', '.join(map(str, sorted(missing)))}",
                    code="direct.missing",
                    about=f"trainer rank {min(missing)}",
                )
            if self._closed.wait(LOOK_S):
                raise self._has_closed()

    def _notices(self) -> list[bytes]:
        with self._lock:
            return [] if self._closed.is_set() else list(self.agent.notices())

    def _place(self, size: int) -> MemoryFile | DeviceMemory:
        """Memory for one rank's part of a bucket."""
        if isinstance(slot := self._slots[0], torch.Tensor):
            return MemoryFile(size)
        if self._landing is None or self._landing.size < size:
            if self._landing is not None:
                self._landing.close()
            self._landing = DeviceMemory(size, slot.device)
        self._landing.clear()  # of another bucket's bytes: nobody writes what pads a tensor, which is zero
        return self._landing

    def _put(self, rank: int, bucket: int, place: MemoryFile | DeviceMemory) -> None:
        """Put the runs of `bucket` for `rank` where its tensors are."""
        if (rank, bucket) not in self._copies:
            self._copies[rank, bucket] = self._records(rank, bucket)
        pieces = self._copies[rank, bucket]
        if pieces is None:
            return
        # The senders' shares of the checksums cover these bytes: what happens to them here is found by a receiver.
        if isinstance(place, MemoryFile):
            kernel.pack(pieces, place.bytes, np.zeros(1, np.uint64))
            return
        with current(place):
            names, device = [f"bucket {bucket} of {self.name}"], place.device
            copies = DevicePlan(pieces, bucket_bytes=place.size, names=names, bucket=str(bucket), device=device)
            sums, flags = (torch.zeros(1, dtype=dtype, device=device) for dtype in (torch.int64, torch.int32))
            kernel_cuda.pack_at(copies, place.address, sums, flags)
            kernel_cuda.results(copies, sums)  # when the copies have ended

    def _records(self, rank: int, bucket: int) -> np.ndarray | None:
        """Records that put what came of `bucket` where the tensors of `rank` are; None: nothing comes."""
        part, slot = self._parts[rank], self._slots[bucket % len(self._slots)]
        memory = slot if isinstance(slot, torch.Tensor) else slot.bytes
        copies = [
            spread(
                pieces_of(part.plan, part.plan.moves_of(run.source, bucket), part.form(bucket), None),
                memory[run.offset : run.offset + run.nbytes] if self._held is None else self._held.run(run),
            )
            for run in self._runs
            if (run.bucket, run.rank) == (bucket, rank)
        ]
        return np.concatenate(copies) if copies else None
