"""Trainer rank's end of direct transfers: a ring of packed buckets, and the engines that they are written to.

NIXL makes progress on a write, and sends its notice, only while it is polled: a thread polls from the first write of a
bucket to the end of its last."""

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
"""Seconds between two polls of writes in flight."""


@dataclass(slots=True)
class Write:
    """Bytes of one bucket for one engine."""

    sources: list[Region]
    targets: list[Region]
    notice: bytes
    transfer: Transfer | None = None
    """None if it has not started."""

    @property
    def nbytes(self) -> int:
        return sum(region.nbytes for region in self.sources)


@dataclass(slots=True)
class EngineLink:
    """Connection to an engine that took part in a publication."""

    peer: str
    """Name of the engine's NIXL agent."""
    offer: Offer
    runs: dict[int, list[PackedRun]]
    """Bucket -> runs of this rank."""
    writes: dict[int, Write] = field(default_factory=dict)
    """Slot -> write, the older one first: a bucket is written after the previous one is done, and arrives after it."""
    failed: str = ""
    """Reason why a write to it failed."""


class DirectSender:
    """Packs this rank's part of each bucket for all engines at once, and writes each engine its runs."""

    def __init__(
        self, packer: Packer, name: str, host: str, *, edges: Sequence[int], item: int = 0, on_gpu: bool = False
    ):
        """Creates a ring of buckets.

        `packer`: of a plan in which receiver e has targets `edges[e]` to `edges[e + 1]`. `item`: bytes of an element if
        changes are sent (`publish.delta`), 0 for full runs. `on_gpu`: True if the ring is in the memory of the rank's
        GPU, which requires full runs."""
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
        """Buffer for a packed part of a bucket before it is compared."""
        self.engines: dict[int, EngineLink] = {}
        self._lock = threading.Lock()
        """Guards the agent and the writes."""
        self._wake = threading.Event()
        self._closed = False
        self._watching = threading.Thread(target=self._watch, name="slimx-direct", daemon=True)
        self._watching.start()

    def connect(self, index: int, offer: Offer) -> None:
        """Connects to the memory of receiver `index`, replacing an earlier connection.

        Raises SlimxError if it expects other bytes than this rank packs."""
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
                    f"engine {offer.engine} expects bytes of bucket {bucket} that differ from those that trainer rank "
                    f"{self.packer.rank} packs; run the same slimx on every machine",
                    code="direct.sizes",
                    about=offer.engine,
                )
        with self._lock:
            self.engines[index] = EngineLink(self.agent.meet(offer.metadata), offer, runs)

    def disconnect(self, index: int) -> None:
        """Disconnects from receiver `index`; writes in flight are cancelled if possible."""
        with self._lock:
            engine = self.engines.pop(index, None)
            if engine is not None:
                for write in engine.writes.values():
                    if write.transfer is not None:
                        write.transfer.drop()
                self.agent.part(engine.peer)

    def send(self, bucket: int, transfer: int, engines: Mapping[int, int]) -> SentBucket:
        """Packs `bucket` and starts writing it to `engines`, each with the index of the transfer whose bytes of this
        bucket it holds (0: none, it receives full runs). Does not wait for the writes.

        The previous bucket in the same slot has reached every active engine: an engine to which it is still in flight
        is lost."""
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
        """Disconnects from all engines and releases the ring."""
        for index in list(self.engines):
            self.disconnect(index)
        self._closed = True
        self._wake.set()
        self._watching.join()
        self._ring.clear()
        self.agent.close()

    def _vacate(self, slot: int) -> dict[int, str]:
        """Frees `slot` from writes to all engines. Returns, by engine, why its bytes never arrived."""
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
        """Polls writes until the sender is closed."""
        with current(self._ring[0]):
            while True:
                self._wake.wait()
                if self._closed:
                    return
                self._wake.clear()
                while self._look() and not self._closed:
                    time.sleep(LOOK_S)

    def _look(self) -> bool:
        """Polls all writes in flight and starts those whose turn it is. Returns True while any are left."""
        with self._lock:
            return any([self._go_on(engine) for engine in self.engines.values()])  # a list, to poll every engine

    def _go_on(self, engine: EngineLink) -> bool:
        """Continues the writes to one engine. Returns True while any are left."""
        for write in engine.writes.values():
            if engine.failed:
                return False
            try:
                if write.transfer is None:
                    write.transfer = self.agent.write(engine.peer, write.sources, write.targets, write.notice)
                if not write.transfer.done:
                    return True
            except LinkError as error:
                engine.failed = f"{error}, of {write.nbytes} bytes"
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
        """Writes the changes in `packed` for the engines `taking` to `slot`. Returns their regions by target."""
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
        """Returns, by target, the region of its run of `bucket` in the bucket's slot, for full runs."""
        placed = {}
        ring = region_of(self._ring[bucket % len(self._ring)])
        address = ring.address
        for target, nbytes in self._sizes(bucket).items():
            placed[target] = Region(address, nbytes, ring.device)
            address += nbytes
        return placed

    def _queue(self, index: int, bucket: int, transfer: int, slot: int, placed: Mapping[int, Region]) -> int:
        """Queues the regions `placed` by target for writing to receiver `index`. Returns their bytes."""
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
        """Returns, by target, the bytes of its run of `bucket`, in the order in which they are packed."""
        if bucket not in self._known:
            moves = self.packer.plan.moves_of(self.packer.rank, bucket)
            self._known[bucket] = dict(sizes_of_runs(self._buckets, bucket, moves, "target"))
        return self._known[bucket]
