"""Trainer ranks and engines that write to one another by NIXL's own agents, on loopback."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from typing import ClassVar

import torch

from slimx.extras.direct.dealing import deal, only
from slimx.extras.direct.ends.offer import Offer, Region
from slimx.extras.direct.ends.receiver import DirectReceiver, Invitation
from slimx.extras.direct.ends.sender import DirectSender
from slimx.extras.direct.ends.sent_bucket import describe_copies
from slimx.reshard.pack.packer import Packer
from slimx.reshard.pack.pieces import PlannedBuckets
from slimx.reshard.packed import PackedBucket
from slimx.reshard.transports.device import DeviceMemory, fetch
from slimx.reshard.transports.memory import open_memory
from tests.unit.layout.layout_stand import Tensors, trainer_shards
from tests.unit.reshard.cuda_stand import DEVICE
from tests.unit.reshard.gather_stand import ENGINE, MODEL, SIZES, WORLD, dressed, plan
from tests.unit.reshard.transport_peer import check

HOST = "127.0.0.1"
ENGINES, RANKS = 2, ENGINE.world
EDGES = range(0, (ENGINES + 1) * RANKS, RANKS)
DEADLINE_S = 300


class MemoryAgent:
    """`slimx.extras.direct.ends.agent.Agent` within one process, which copies at once: for many publications."""

    agents: ClassVar[dict[str, MemoryAgent]] = {}
    state, ended, done = "DONE", True, True

    def __init__(self, name: str, host: str):
        self.name, self.inbox = name, []
        self.agents[name] = self

    @property
    def metadata(self) -> bytes:
        return self.name.encode()

    def register(self, nbytes: int, *, pinned: bool = False) -> torch.Tensor:
        return torch.zeros(max(nbytes, 1), dtype=torch.uint8)

    def register_gpu(self, nbytes: int, device: torch.device | int) -> DeviceMemory:
        return DeviceMemory(max(nbytes, 1), device)

    def meet(self, metadata: bytes) -> str:
        return metadata.decode()

    def part(self, peer: str) -> None: ...

    def write(self, peer: str, here: Sequence[Region], there: Sequence[Region], notice: bytes) -> MemoryAgent:
        """Copies, and leaves the notice; returns itself as a transfer that is done."""
        for source, target in zip(here, there, strict=True):
            assert source.nbytes == target.nbytes
            ctypes.memmove(target.address, source.address, source.nbytes)
        self.agents[peer].inbox.append(notice)
        return self

    def drop(self) -> None: ...

    def notices(self) -> Iterator[bytes]:
        while self.inbox:
            yield self.inbox.pop(0)

    def close(self) -> None: ...


class Stand:
    """Three trainer ranks and two engines of two ranks, each with an agent of its own."""

    def __init__(
        self, stack: ExitStack, *, item: int = 0, trainers: list[Tensors] | None = None, on_gpus: bool = False
    ):
        """Builds the stand. `item`: of elements whose changes travel, 0 for whole runs; `trainers`: tensors by rank.
        `on_gpus`: whether bytes travel from GPU to GPU, to a receiver for each engine rank."""
        self.item, self.on_gpus = item, on_gpus
        self.receiver_ranks = 1 if on_gpus else RANKS
        """Ranks of a receiver."""
        edges = range(0, ENGINES * RANKS + 1, self.receiver_ranks)
        self.wire = 0
        """Bytes sent to all engines."""
        self.plan, self._transfers = plan(), count(1)
        self.dealt = deal(self.plan, engines=ENGINES, grain=1)
        self.form = PlannedBuckets(self.plan, apart=True).form
        parameters = trainers or [dressed(tensors) for tensors in trainer_shards(MODEL, SIZES)]
        mark = time.monotonic_ns()
        self.senders = [
            DirectSender(
                Packer(self.dealt, rank, tensors),
                f"trainer-{rank}-{mark}",
                HOST,
                edges=edges,
                item=item,
                on_gpu=on_gpus,
            )
            for rank, tensors in enumerate(parameters)
        ]
        self.receivers = [self.receiver(number, f"engine-{number}-{mark}") for number in range(len(edges) - 1)]
        stack.callback(self.close)
        for number in range(len(self.receivers)):
            self.connect(number)

    def close(self) -> None:
        for end in (*self.senders, *self.receivers):
            end.close()

    def next(self) -> int:
        """Returns the number of another publication."""
        return next(self._transfers)

    def receiver(self, number: int, name: str) -> DirectReceiver:
        parts = tuple(
            only(self.dealt, number * self.receiver_ranks + rank).to_bytes() for rank in range(self.receiver_ranks)
        )
        gpu = 0 if self.on_gpus else None
        return DirectReceiver(Invitation(name, parts, DEADLINE_S, self.item, gpu), HOST)

    def connect(self, number: int) -> None:
        offer = Offer.from_bytes(self.receivers[number].offer().to_bytes())
        for rank, sender in enumerate(self.senders):
            sender.connect(number, offer.of(rank))

    def send(
        self,
        bucket: int,
        transfer: int,
        *,
        ranks: Collection[int] = range(WORLD),
        bases: Mapping[int, int] | None = None,
    ) -> PackedBucket:
        """Sends a bucket from trainer `ranks` to the receivers of `bases`, each with the transfer that it has; to all
        by default, which have none."""
        bases = dict.fromkeys(range(len(self.receivers)), 0) if bases is None else bases
        sent = [self.senders[rank].send(bucket, transfer, bases if rank in ranks else {}) for rank in range(WORLD)]
        assert not any(result.failed for result in sent)
        self.wire += sum(result.nbytes for result in sent)
        shares = [result.contribution for result in sent]
        apart = PlannedBuckets(self.plan, apart=True)
        (packed,) = describe_copies(apart, [0] * ENGINES, shares, {}, transfer=transfer, bucket=bucket).values()
        return packed


def take(packed: PackedBucket, number: int, device: torch.device = DEVICE) -> Tensors:
    """Returns the tensors of a landed bucket for rank `number` on `device`, by name, each proven by its checksum."""
    part = packed.parts("local", RANKS)[str(number)]
    if packed.on_device:
        memory = fetch(part["fd_path"], 0, part["size"], device).cpu()
    else:
        memory = open_memory(part["fd_path"], part["size"], private=True)
    check(replace(packed, path=part["fd_path"]), number, memory)
    return {
        t.name: memory[t.offset : t.offset + t.nbytes].view(getattr(torch, t.dtype)).view(t.shape).clone()
        for t in packed.targets[number]
    }
