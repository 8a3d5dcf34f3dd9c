"""Receiver of direct transfers at an engine: memory that trainer ranks write into, and assembly of buckets from it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from slimx.extras.direct import SLOTS
from slimx.extras.direct.ends.agent import Agent, LinkError, current, region_of
from slimx.extras.direct.ends.deltas import ReceivedRuns
from slimx.extras.direct.ends.offer import Notice, Offer, PackedRun, arrivals
from slimx.extras.direct.ends.sent_bucket import in_flight
from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.kernels import cuda as kernel_cuda
from slimx.reshard.kernels.cuda import DevicePlan
from slimx.reshard.pack.pieces import PlannedBuckets, pieces_of, spread
from slimx.reshard.packed import PackedBucket
from slimx.reshard.plan.copy_plan import Plan
from slimx.reshard.transports.device import DeviceMemory
from slimx.reshard.transports.memory import MemoryFile

LOOK_S = 0.001
"""Interval in seconds at which notices of arrived bytes are polled."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """Description of the bytes destined for one receiver, from which the engine creates the receiver."""

    name: str
    """Name of the receiver's NIXL agent, unique for each start of the engine."""
    parts: tuple[bytes, ...]
    """For each engine rank that the receiver serves, the serialized plan of the bytes for this rank."""
    deadline_s: float
    """Seconds within which a bucket must arrive."""
    item: int = 0
    """Element size in bytes if changes are sent (`publish.delta`); 0 if all bytes are sent each time."""
    gpu: int | None = None
    """Index, in the receiver's process, of the GPU whose memory receives the bytes; None for host memory."""


class DirectReceiver:
    """Memory into which trainer ranks write: host memory for all ranks of an engine on one machine, or memory of one
    GPU for the rank on it.

    Buckets are received one after the other."""

    def __init__(self, invitation: Invitation, host: str):
        """Allocates memory and registers it with NIXL. `host`: address of this machine."""
        parts = [Plan.from_bytes(part) for part in invitation.parts]
        self.name = invitation.name
        self.deadline_s = invitation.deadline_s
        self.item = invitation.item
        self._parts = [PlannedBuckets(part) for part in parts]
        self._runs, room = arrivals(parts, self.item)
        self._received = ReceivedRuns(self.item, parts[0].count) if self.item else None
        self.agent = Agent(self.name, host)
        self._slots: list[torch.Tensor | DeviceMemory] = []
        for _ in range(min(SLOTS, parts[0].count)):
            if invitation.gpu is None:
                self._slots.append(self.agent.register(room))
            else:
                self._slots.append(self.agent.register_gpu(room, invitation.gpu))
        self._landing: DeviceMemory | None = None
        """GPU memory in which buckets are assembled, one after the other; None before the first bucket, or if the
        receiver uses host memory."""
        self._arrived: dict[tuple[int, int], set[int]] = {}
        """(transfer, bucket) -> trainer ranks whose bytes have arrived."""
        self._copies: dict[tuple[int, int], np.ndarray | None] = {}
        """(rank, bucket) -> input records for the kernel that copies received bytes to their tensors; None if the rank
        receives nothing."""
        self._closed = threading.Event()
        self._lock = threading.Lock()
        """Lock that protects the agent and its memory, because `close` and `landed` may be called in different
        threads."""

    def offer(self) -> Offer:
        slots = tuple(map(region_of, self._slots))
        return Offer(self.name, self.agent.metadata, slots, tuple(self._runs), self.item)

    def bases(self) -> list[int]:
        """Returns, for each bucket, the index of the transfer whose bytes are still stored as a base for changes; 0 if
        none are stored."""
        return [] if self._received is None else list(self._received.bases)

    @contextmanager
    def landed(self, packed: PackedBucket) -> Iterator[PackedBucket]:
        """Waits until a bucket has arrived, and yields it with the tensors of this receiver's ranks, each rank's in
        separate memory.

        Processes that have opened host memory can use it after the block; GPU memory is reused for the next bucket.
        Raises LinkError if bytes do not arrive in time, naming the trainer ranks that should have sent them, or if this
        receiver is closed."""
        transfer, bucket = in_flight(packed)
        with self._opened() as slots:
            first = slots[0]
        with current(first):
            self._wait(transfer, bucket)
        forms = [part.form(bucket) for part in self._parts]
        # The server expects one size for all ranks, that of the largest; untouched host memory occupies no pages.
        size = packed.size
        files: list[MemoryFile | DeviceMemory] = []
        try:
            with self._opened() as slots:
                if self._received is not None:
                    slot = slots[bucket % len(slots)]
                    assert isinstance(slot, torch.Tensor), "changes are received only in host memory"
                    self._received.take(self.name, bucket, transfer, self._runs_of(bucket), slot)
                for rank in range(len(forms)):
                    files.append(self._place(size))
                    self._put(rank, bucket, files[rank])
            targets = []
            for target, form in zip(packed.targets, forms, strict=True):
                offsets = form.offset.tolist()
                targets.append(tuple(replace(t, offset=offset) for t, offset in zip(target, offsets, strict=True)))
            yield PackedBucket(files[0].path, size, tuple(targets), tuple(file.path for file in files[1:]))
        finally:
            for file in files:
                if isinstance(file, MemoryFile):
                    file.close()

    def close(self) -> None:
        """Releases the memory, after interrupting a pending wait for a bucket and waiting for copies in progress."""
        self._closed.set()
        with self._lock:
            self._slots.clear()
            self.agent.close()
            if self._landing is not None:
                self._landing.close()
                self._landing = None

    @contextmanager
    def _opened(self) -> Iterator[list[torch.Tensor | DeviceMemory]]:
        """Yields the slots, and prevents the release of their memory within the block. Raises LinkError if the memory
        has already been released."""
        with self._lock:
            if self._closed.is_set():
                raise self._has_closed()
            yield self._slots

    def _has_closed(self) -> LinkError:
        return LinkError(
            f"the receiver of engine {self.name} was closed; connect the trainers to the engine again",
            code="direct.closed",
            about=self.name,
        )

    def _wait(self, transfer: int, bucket: int) -> None:
        runs = self._runs_of(bucket)
        sources = {run.source for run in runs}
        deadline = time.monotonic() + self.deadline_s
        while True:
            for data in self._notices():
                notice = Notice.from_bytes(data)
                if notice is not None:
                    self._arrived.setdefault((notice.transfer, notice.bucket), set()).add(notice.source)
            # Notices of earlier transfers or buckets are dropped.
            self._arrived = {key: ranks for key, ranks in self._arrived.items() if key >= (transfer, bucket)}
            missing = sources - self._arrived.get((transfer, bucket), set())
            if not missing:
                return
            if time.monotonic() > deadline:
                lacking = sum(run.nbytes for run in runs if run.source in missing)
                total = sum(run.nbytes for run in runs)
                raise LinkError(
                    f"{lacking} of {total} bytes of bucket {bucket} from trainer ranks "
                    f"{', '.join(map(str, sorted(missing)))} did not arrive at engine {self.name} within "
                    f"{self.deadline_s:.0f} s; find the cause in the logs of these ranks, or set cluster.network "
                    "to a network that connects them to the engine",
                    code="direct.missing",
                    about=f"trainer rank {min(missing)}",
                )
            if self._closed.wait(LOOK_S):
                raise self._has_closed()

    def _runs_of(self, bucket: int) -> list[PackedRun]:
        return [run for run in self._runs if run.bucket == bucket]

    def _notices(self) -> list[bytes]:
        with self._lock:
            return [] if self._closed.is_set() else list(self.agent.notices())

    def _place(self, size: int) -> MemoryFile | DeviceMemory:
        """Returns zeroed memory of at least `size` bytes, in which one rank's part of a bucket is assembled."""
        slot = self._slots[0]
        if isinstance(slot, torch.Tensor):
            return MemoryFile(size)
        if self._landing is None or self._landing.size < size:
            if self._landing is not None:
                self._landing.close()
            self._landing = DeviceMemory(size, slot.device)
        self._landing.clear()  # may contain another bucket's bytes; padding must be zero, and no rank writes it
        return self._landing

    def _put(self, rank: int, bucket: int, place: MemoryFile | DeviceMemory) -> None:
        """Copies the received byte ranges (runs) of `bucket` for `rank` to the positions of their tensors in
        `place`."""
        if (rank, bucket) not in self._copies:
            self._copies[rank, bucket] = self._records(rank, bucket)
        pieces = self._copies[rank, bucket]
        if pieces is None:
            return
        # Not summed again: the senders' checksums cover these bytes, so the server would detect a corrupted copy.
        if isinstance(place, MemoryFile):
            kernel.pack(pieces, place.bytes, np.zeros(1, np.uint64))
            return
        with current(place):
            names = [f"bucket {bucket} of {self.name}"]
            device = place.device
            copies = DevicePlan(pieces, bucket_bytes=place.size, names=names, bucket=str(bucket), device=device)
            sums = torch.zeros(1, dtype=torch.int64, device=device)
            flags = torch.zeros(1, dtype=torch.int32, device=device)
            kernel_cuda.pack_at(copies, place.address, sums, flags)
            kernel_cuda.results(copies, sums)  # waits until the copies have ended

    def _records(self, rank: int, bucket: int) -> np.ndarray | None:
        """Returns input records for the kernel that copies the received bytes of `bucket` to the tensors of `rank`;
        None if the rank receives nothing."""
        part = self._parts[rank]
        slot = self._slots[bucket % len(self._slots)]
        memory = slot if isinstance(slot, torch.Tensor) else slot.bytes
        copies = []
        for run in self._runs:
            if (run.bucket, run.rank) != (bucket, rank):
                continue
            pieces = pieces_of(part.plan, part.plan.moves_of(run.source, bucket), part.form(bucket), None)
            if self._received is None:
                copies.append(spread(pieces, memory[run.offset : run.offset + run.nbytes]))
            else:
                copies.append(spread(pieces, self._received.run(run)))
        return np.concatenate(copies) if copies else None
