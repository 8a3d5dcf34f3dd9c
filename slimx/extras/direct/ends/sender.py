"""A trainer rank's end of direct transfers: a ring of packed buckets, and the engines that they are written to.

NIXL goes on with a write, and sends its notice, only while somebody looks at it: a thread does, from the first write of
a bucket to the end of its last.
"""

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
from slimx.extras.direct.ends.copies import SentBucket
from slimx.extras.direct.ends.deltas import Sent
from slimx.extras.direct.ends.offer import Notice, Offer, Region, Run, room_of, sizes_of_runs
from slimx.reshard.pack.packer import Packer
from slimx.reshard.pack.pieces import PlannedBuckets
from slimx.reshard.transports.device import DeviceMemory

LOOK_S = 0.0005
"""Seconds between two looks at the writes under way."""


@dataclass(slots=True)
class Write:
    """One bucket's bytes for one engine."""

    here: list[Region]
    there: list[Region]
    notice: bytes
    transfer: Transfer | None = None
    """None: it waits for its turn."""

    @property
    def nbytes(self) -> int:
        return sum(region.nbytes for region in self.here)


@dataclass(slots=True)
class Engine:
    """An engine that took part in a publication."""

    peer: str
    """Name of its agent."""
    offer: Offer
    runs: dict[int, list[Run]]
    """By bucket, those of this rank."""
    writes: dict[int, Write] = field(default_factory=dict)
    """By slot, the older one first: a bucket is written when the one before it is done, and so comes before it."""
    failed: str = ""
    """Why a write to it failed."""


class Sender:
    """Packs this rank's part of each bucket for all engines in one go, and writes to each engine what is its own."""

    def __init__(
        self, packer: Packer, name: str, host: str, *, edges: Sequence[int], item: int = 0, on_gpu: bool = False
    ):
        """`packer`: of a plan of which receiver e is written targets `edges[e]` to `edges[e + 1]`. `item`: bytes of an
        element where changes travel (`publish.delta`), 0 where whole runs do. `on_gpu`: whether the ring is in the
        memory of the rank's GPU; it is not where changes travel."""
        self.packer, self.edges, self.item, self.agent = packer, edges, item, Agent(name, host)
        self._buckets = PlannedBuckets(packer.plan)
        self._known: dict[int, dict[int, int]] = {}
        sizes = [self._sizes(bucket).values() for bucket in range(packer.plan.count)]
        room = max(sum(room_of(nbytes, item) for nbytes in own) for own in sizes)
        pinned = packer.device.type == "cuda"
        self._ring = [
            self.agent.register_gpu(room, packer.device) if on_gpu else self.agent.register(room, pinned=pinned)
            for _ in range(min(SLOTS, packer.plan.count))
        ]
        self._sent = Sent(item) if item else None
        self._packed = torch.empty(max(map(sum, sizes)), dtype=torch.uint8) if item else None
        """A part of a bucket, packed, before it is compared."""
        self.engines: dict[int, Engine] = {}
        self._lock = threading.Lock()
        """Guards the agent and the writes."""
        self._wake, self._closed = threading.Event(), False
        self._watching = threading.Thread(target=self._watch, name="slimx-direct", daemon=True)
        self._watching.start()

    def connect(self, number: int, offer: Offer) -> None:
        """Get to know the memory of engine `number`, in place of what it had before.

        Raises SlimxError if it expects other bytes than this rank packs.
        """
        self.disconnect(number)
        runs: dict[int, list[Run]] = {bucket: [] for bucket in range(self.packer.plan.count)}
        for run in offer.runs:
            runs.setdefault(run.bucket, []).append(run)
        first, end = self.edges[number : number + 2]
        for bucket, own in runs.items():
            packed = self._sizes(bucket) if bucket < self.packer.plan.count else {}
            wanted = {first + run.rank: run.nbytes for run in own}
            if offer.item != self.item or wanted != {t: nbytes for t, nbytes in packed.items() if first <= t < end}:
                raise SlimxError(
                    f"engine {offer.engine} expects other bytes of bucket {bucket} than trainer rank "
                    f"{self.packer.rank} packs for it; run the same slimx on every machine",
                    code="direct.sizes",
                    about=offer.engine,
                )
        with self._lock:
            self.engines[number] = Engine(self.agent.meet(offer.metadata), offer, runs)

    def disconnect(self, number: int) -> None:
        """Forget engine `number`; what is under way to it is called back where that can be."""
        with self._lock:
            if (engine := self.engines.pop(number, None)) is not None:
                for write in engine.writes.values():
                    if write.transfer is not None:
                        write.transfer.drop()
                self.agent.part(engine.peer)

    def send(self, bucket: int, transfer: int, engines: Mapping[int, int]) -> SentBucket:
        """Pack `bucket` and have it written to `engines`, each with the number of the transfer whose bytes of this
        bucket it holds (0: none, it gets whole runs); does not wait for the writes.

        The bucket that was in the same slot has reached every engine that still counts: an engine to which it is still
        under way is lost.
        """
        slot = bucket % len(self._ring)
        failed = self._vacate(slot)
        taking = {number: base for number, base in engines.items() if number not in failed}
        ring = self._ring[slot]
        if isinstance(ring, DeviceMemory):
            share, placed = self.packer.pack_run_at(bucket, ring.address), self._places(bucket)
        elif self._sent is None:
            share, placed = self.packer.pack_run(bucket, ring)[1], self._places(bucket)
        else:
            run, share = self.packer.pack_run(bucket, self._packed)
            placed = self._compare(bucket, transfer, taking, run, ring)
        with self._lock:
            written = sum(self._queue(number, bucket, transfer, slot, placed) for number in taking)
        self._look()
        self._wake.set()
        return SentBucket(share, failed, written)

    def close(self) -> None:
        """Forget all engines and give the ring back."""
        for number in list(self.engines):
            self.disconnect(number)
        self._closed = True
        self._wake.set()
        self._watching.join()
        self._ring.clear()
        self.agent.close()

    def _vacate(self, slot: int) -> dict[int, str]:
        """Take `slot` back from all engines; by engine why its bytes never arrived."""
        failed = {}
        with self._lock:
            for number, engine in self.engines.items():
                if (before := engine.writes.pop(slot, None)) is not None:
                    if before.transfer is None or not before.transfer.ended:
                        engine.failed = (
                            engine.failed
                            or f"{before.nbytes} bytes of an earlier bucket are still under way to {engine.peer}"
                        )
                    if before.transfer is not None:
                        before.transfer.drop()
                if engine.failed:
                    failed[number] = engine.failed
        return failed

    def _watch(self) -> None:
        """Keep writes going until the sender is closed."""
        with current(self._ring[0]):
            while True:
                self._wake.wait()
                if self._closed:
                    return
                self._wake.clear()
                while self._look() and not self._closed:
                    time.sleep(LOOK_S)

    def _look(self) -> bool:
        """Look at everything under way, and begin what has its turn; True while there is anything left to do."""
        with self._lock:
            return any([self._go_on(engine) for engine in self.engines.values()])  # every one is looked at

    def _go_on(self, engine: Engine) -> bool:
        """Go on with the writes to one engine; True while some are left."""
        for write in engine.writes.values():
            if engine.failed:
                return False
            try:
                if write.transfer is None:
                    write.transfer = self.agent.write(engine.peer, write.here, write.there, write.notice)
                if not write.transfer.done:
                    return True
            except LinkError as error:
                engine.failed = f"{error}, of {write.nbytes} bytes"
        return False

    def _compare(
        self, bucket: int, transfer: int, taking: Mapping[int, int], packed: torch.Tensor, slot: torch.Tensor
    ) -> dict[int, Region]:
        """Write what has changed for the engines `taking` in `packed` into `slot`; by target where it is."""
        placed, start, offset = {}, 0, 0
        for target, nbytes in self._sizes(bucket).items():
            if (base := taking.get(bisect(self.edges, target) - 1)) is not None:
                fresh, place = packed[start : start + nbytes], slot[offset : offset + room_of(nbytes, self.item)]
                length = self._sent.write(bucket, target, fresh, place, transfer=transfer, base=base)
                placed[target] = Region(place.data_ptr(), length)
            start, offset = start + nbytes, offset + room_of(nbytes, self.item)
        return placed

    def _places(self, bucket: int) -> dict[int, Region]:
        """By target where its run of `bucket` is, in the bucket's slot, if runs travel as they are."""
        placed, ring = {}, region_of(self._ring[bucket % len(self._ring)])
        address = ring.address
        for target, nbytes in self._sizes(bucket).items():
            placed[target] = Region(address, nbytes, ring.device)
            address += nbytes
        return placed

    def _queue(self, number: int, bucket: int, transfer: int, slot: int, placed: Mapping[int, Region]) -> int:
        """Have what is `placed` by target written to engine `number`; its bytes."""
        engine = self.engines[number]
        if not (runs := engine.runs[bucket]):
            return 0
        place = engine.offer.slots[bucket % len(engine.offer.slots)]
        here = [placed[self.edges[number] + run.rank] for run in runs]
        there = [
            Region(place.address + run.offset, own.nbytes, place.device) for run, own in zip(runs, here, strict=True)
        ]
        notice = Notice(transfer, bucket, self.packer.rank)
        engine.writes[slot] = Write(here, there, notice.to_bytes())
        return engine.writes[slot].nbytes

    def _sizes(self, bucket: int) -> dict[int, int]:
        """By target the bytes of the run of `bucket`, in the order in which they are packed."""
        if bucket not in self._known:
            moves = self.packer.plan.moves_of(self.packer.rank, bucket)
            self._known[bucket] = dict(sizes_of_runs(self._buckets, bucket, moves, "target"))
        return self._known[bucket]
