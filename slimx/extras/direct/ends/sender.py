"""Sender of direct transfers on a trainer rank: packs buckets in a ring buffer and writes them to engines.

NIXL makes progress on a write, and sends its notice, only while the write is polled. A thread therefore polls from the
first write of a bucket to the end of the last one."""

from __future__ import annotations

import threading
import time
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from slimx.errors import SlimxError
from slimx.extras.direct import SLOTS
from slimx.extras.direct.ends.agent import Agent, LinkError, Transfer, current, region_of
from slimx.extras.direct.ends.deltas import SentRuns
from slimx.extras.direct.ends.offer import Notice, Offer, PackedRun, Region, room_of, sizes_of_runs
from slimx.extras.direct.ends.sent_bucket import SentBucket
from slimx.reshard.pack.packer import Packer
from slimx.reshard.pack.pieces import PlannedBuckets
from slimx.reshard.transports.device import DeviceMemory

LOOK_S = 0.0005
"""Interval in seconds at which writes in flight are polled."""


@dataclass(slots=True)
class Write:
    """Queued or started write of one bucket's bytes to one receiver."""

    sources: list[Region]
    targets: list[Region]
    notice: bytes
    transfer: Transfer | None = None
    """NIXL's transfer; None until the write has started."""

    @property
    def nbytes(self) -> int:
        return sum(region.nbytes for region in self.sources)


@dataclass(slots=True)
class EngineLink:
    """Connection to one receiver of an engine, with the writes to it."""

    peer: str
    """Name of the receiver's NIXL agent."""
    offer: Offer
    runs: dict[int, list[PackedRun]]
    """Bucket -> locations of this rank's runs (contiguous ranges of bytes) in the receiver's memory."""
    writes: dict[int, Write] = field(default_factory=dict)
    """Slot of the ring buffer -> write from this slot, the oldest first. The write of a bucket starts after that of the
    previous bucket is done, so that buckets arrive in order."""
    failed: str = ""
    """Reason why a write to the receiver has failed; "" if none has."""


class DirectSender:
    """Sender that packs this rank's part of each bucket for all engines at once, and writes to each receiver the byte
    ranges (runs) for it."""

    def __init__(
        self, packer: Packer, name: str, host: str, *, edges: Sequence[int], item: int = 0, on_gpu: bool = False
    ):
        """Allocates the ring buffer for packed buckets and starts the polling thread. `packer`: packer of a plan in
        which receiver e has the targets `edges[e]` to `edges[e + 1]` - 1. `name`, `host`: as in `Agent`. `item`:
        element size in bytes if changes are sent (`publish.delta`), 0 if all bytes are sent each time. `on_gpu`: True
        to allocate the ring buffer in the memory of the rank's GPU, which requires that `item` is 0."""
        self.packer = packer
        self.edges = edges
        self.item = item
        self.agent = Agent(name, host)
        self._buckets = PlannedBuckets(packer.plan)
        self._known: dict[int, dict[int, int]] = {}
        sizes = [self._sizes(bucket).values() for bucket in range(packer.plan.count)]
        room = 0
        for bucket_sizes in sizes:
            room = max(room, sum(room_of(nbytes, item) for nbytes in bucket_sizes))
        pinned = packer.device.type == "cuda"
        self._ring: list[torch.Tensor | DeviceMemory] = []
        for _ in range(min(SLOTS, packer.plan.count)):
            if on_gpu:
                self._ring.append(self.agent.register_gpu(room, packer.device))
            else:
                self._ring.append(self.agent.register(room, pinned=pinned))
        self._sent = SentRuns(item) if item else None
        self._packed = torch.empty(max(map(sum, sizes)), dtype=torch.uint8) if item else None
        """Buffer in which this rank's part of a bucket is packed before it is compared with the bytes sent last; None
        if all bytes are sent each time."""
        self.engines: dict[int, EngineLink] = {}
        self._lock = threading.Lock()
        """Lock that protects the agent and the writes."""
        self._wake = threading.Event()
        self._closed = False
        self._watching = threading.Thread(target=self._watch, name="slimx-direct", daemon=True)
        self._watching.start()

    def connect(self, index: int, offer: Offer) -> None:
        """Connects to the memory that receiver `index` offers, replacing an earlier connection.

        Raises SlimxError if the receiver expects bytes other than those that this rank packs."""
        self.disconnect(index)
        runs: dict[int, list[PackedRun]] = {bucket: [] for bucket in range(self.packer.plan.count)}
        for run in offer.runs:
            runs.setdefault(run.bucket, []).append(run)
        first, end = self.edges[index : index + 2]
        for bucket, bucket_runs in runs.items():
            packed = self._sizes(bucket) if bucket < self.packer.plan.count else {}
            packed = {target: nbytes for target, nbytes in packed.items() if first <= target < end}
            expected = {first + run.rank: run.nbytes for run in bucket_runs}
            if offer.item != self.item or expected != packed:
                raise SlimxError(
                    f"engine {offer.engine} expects different bytes of bucket {bucket} than trainer rank "
                    f"{self.packer.rank} packs; install the same version of slimx on every machine",
                    code="direct.sizes",
                    about=offer.engine,
                )
        with self._lock:
            self.engines[index] = EngineLink(self.agent.meet(offer.metadata), offer, runs)

    def disconnect(self, index: int) -> None:
        """Disconnects from receiver `index`; cancels writes in flight if possible."""
        with self._lock:
            engine = self.engines.pop(index, None)
            if engine is not None:
                for write in engine.writes.values():
                    if write.transfer is not None:
                        write.transfer.drop()
                self.agent.part(engine.peer)

    def send(self, bucket: int, transfer: int, engines: Mapping[int, int]) -> SentBucket:
        """Packs `bucket` and starts writing it to receivers, without waiting for the writes.

        `transfer`: index of the publication. `engines`: receiver -> index of the transfer whose bytes of this bucket it
        has; 0 if it has none, in which case all bytes are sent to it. The bucket reuses the memory of an earlier one in
        the ring buffer. If a receiver has not yet received all of the earlier bucket, the write to it is cancelled, and
        the receiver counts as failed."""
        slot = bucket % len(self._ring)
        failed = self._vacate(slot)
        taking = {index: base for index, base in engines.items() if index not in failed}
        ring = self._ring[slot]
        if isinstance(ring, DeviceMemory):
            contribution = self.packer.pack_run_at(bucket, ring.address)
            placed = self._places(bucket)
        elif self._sent is None:
            _, contribution = self.packer.pack_run(bucket, ring)
            placed = self._places(bucket)
        else:
            run, contribution = self.packer.pack_run(bucket, self._packed)
            placed = self._compare(self._sent, bucket, transfer, taking, run, ring)
        with self._lock:
            written = sum(self._queue(index, bucket, transfer, slot, placed) for index in taking)
        self._look()
        self._wake.set()
        return SentBucket(contribution, failed, written)

    def close(self) -> None:
        """Disconnects from all receivers and releases the ring buffer."""
        for index in list(self.engines):
            self.disconnect(index)
        self._closed = True
        self._wake.set()
        self._watching.join()
        self._ring.clear()
        self.agent.close()

    def _vacate(self, slot: int) -> dict[int, str]:
        """Releases the writes from `slot` to all receivers, and cancels those that are still in flight. Returns
        {receiver that has failed: reason}."""
        failed = {}
        with self._lock:
            for index, engine in self.engines.items():
                previous = engine.writes.pop(slot, None)
                if previous is not None:
                    unfinished = previous.transfer is None or not previous.transfer.ended
                    if unfinished and not engine.failed:
                        engine.failed = (
                            f"{previous.nbytes} bytes of an earlier bucket are still in flight to {engine.peer}"
                        )
                    if previous.transfer is not None:
                        previous.transfer.drop()
                if engine.failed:
                    failed[index] = engine.failed
        return failed

    def _watch(self) -> None:
        """Polls the writes in the sender's thread until the sender is closed."""
        with current(self._ring[0]):
            while True:
                self._wake.wait()
                if self._closed:
                    return
                self._wake.clear()
                while self._look() and not self._closed:
                    time.sleep(LOOK_S)

    def _look(self) -> bool:
        """Polls all writes in flight, and starts the next write to each receiver whose previous one has finished.
        Returns True if any writes remain."""
        with self._lock:
            return any([self._go_on(engine) for engine in self.engines.values()])  # a list, so that all are polled

    def _go_on(self, engine: EngineLink) -> bool:
        """Polls the writes to one receiver in order, and starts each one once the previous one is done. Returns True if
        any remain."""
        for write in engine.writes.values():
            if engine.failed:
                return False
            try:
                if write.transfer is None:
                    write.transfer = self.agent.write(engine.peer, write.sources, write.targets, write.notice)
                if not write.transfer.done:
                    return True
            except LinkError as error:
                engine.failed = f"{error}; the write had {write.nbytes} bytes"
        return False

    def _compare(
        self,
        sent: SentRuns,
        bucket: int,
        transfer: int,
        taking: Mapping[int, int],
        packed: torch.Tensor,
        slot: torch.Tensor,
    ) -> dict[int, Region]:
        """Writes the encoded changes of `packed`, all bytes that this rank has packed for `bucket`, into `slot`.
        Returns for each target the region of `slot` to send.

        `sent`: store of the bytes that were sent last. `taking`: receiver -> index of the transfer whose bytes it has;
        receivers that are not in it are sent nothing."""
        placed = {}
        start = 0
        offset = 0
        for target, nbytes in self._sizes(bucket).items():
            room = room_of(nbytes, self.item)
            base = taking.get(bisect(self.edges, target) - 1)
            if base is not None:
                out = slot[offset : offset + room]
                run = packed[start : start + nbytes]
                length = sent.write(bucket, target, run, out, transfer=transfer, base=base)
                placed[target] = Region(out.data_ptr(), length)
            start += nbytes
            offset += room
        return placed

    def _places(self, bucket: int) -> dict[int, Region]:
        """Returns for each target the region of the ring buffer that contains all bytes of `bucket` for this target."""
        placed = {}
        ring = region_of(self._ring[bucket % len(self._ring)])
        address = ring.address
        for target, nbytes in self._sizes(bucket).items():
            placed[target] = Region(address, nbytes, ring.device)
            address += nbytes
        return placed

    def _queue(self, index: int, bucket: int, transfer: int, slot: int, placed: Mapping[int, Region]) -> int:
        """Queues this rank's contiguous ranges (runs) of `bucket` for writing to receiver `index`. Returns the number
        of queued bytes. `placed`: for each target, the region of the ring buffer that contains the run for this
        target."""
        engine = self.engines[index]
        runs = engine.runs[bucket]
        if not runs:
            return 0
        memory = engine.offer.slots[bucket % len(engine.offer.slots)]
        sources = []
        targets = []
        for run in runs:
            source = placed[self.edges[index] + run.rank]
            sources.append(source)
            targets.append(Region(memory.address + run.offset, source.nbytes, memory.device))
        notice = Notice(transfer, bucket, self.packer.rank)
        engine.writes[slot] = Write(sources, targets, notice.to_bytes())
        return engine.writes[slot].nbytes

    def _sizes(self, bucket: int) -> dict[int, int]:
        """Returns, for each target in packing order, the number of bytes that this rank packs for the target in
        `bucket`."""
        if bucket not in self._known:
            moves = self.packer.plan.moves_of(self.packer.rank, bucket)
            self._known[bucket] = dict(sizes_of_runs(self._buckets, bucket, moves, "target"))
        return self._known[bucket]
