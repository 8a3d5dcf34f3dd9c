"""Bytes that trainer ranks send reach each machine of an engine, whole or in ranks' shares, by slimx's own two ends.

The agents copy at once (direct_stand); NIXL's own are in `tests/extras/direct/test_direct.py`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from slimx.extras.direct.delivery import DirectDelivery, receivers_of
from slimx.extras.direct.ends import receiver, sender
from slimx.extras.direct.ends.engine_end import DirectEnd
from slimx.extras.direct.ends.offer import Offer
from slimx.extras.direct.ends.sender import DirectSender
from slimx.extras.direct.ends.sent_bucket import SentBucket
from slimx.extras.direct.source import DirectSource
from slimx.layout.megatron import MegatronLayout
from slimx.layout.number_formats import Precision
from slimx.layout.table import checkpoint_parts
from slimx.reshard.manifest import Manifest
from slimx.reshard.pack.packer import Packer
from slimx.reshard.packed import PackedBucket
from slimx.reshard.parties import LocalRecipient
from slimx.reshard.plan.copy_plan import Plan, compile_plan
from slimx.reshard.transports.memory import open_memory
from tests.extras.direct.direct_stand import HOST, MemoryAgent
from tests.refusals import refused
from tests.unit.layout.engine_stand import SERVED, engine_rank
from tests.unit.layout.layout_stand import Tensors, checkpoint, trainer_shards
from tests.unit.reshard.gather_stand import ENGINE, MODEL, SIZES, dressed, plan
from tests.unit.reshard.transport_peer import check
from tests.waits import until

MACHINES = {"wide": 2, "narrow": 1}


class Trainers:
    """All trainer ranks, each with its sender."""

    def __init__(self, published: Plan):
        self.published, self.shards = published, [dressed(tensors) for tensors in trainer_shards(MODEL, SIZES)]
        self.actors = list(range(len(self.shards)))

    async def prepare(self, dealt: Plan, edges: list[int], item: int, on_gpus: bool) -> None:
        data = dealt.to_bytes()
        packers = [Packer(Plan.from_bytes(data), rank, tensors) for rank, tensors in enumerate(self.shards)]
        self.senders = [
            DirectSender(packer, f"trainer {packer.rank}", HOST, edges=edges, item=item) for packer in packers
        ]

    async def connect(self, number: int, offer: Offer) -> None:
        for rank, rank_sender in enumerate(self.senders):
            rank_sender.connect(number, Offer.from_bytes(offer.of(rank).to_bytes()))

    async def send(self, bucket: int, transfer: int, engines: dict[int, int]) -> list[SentBucket]:
        return [rank_sender.send(bucket, transfer, engines) for rank_sender in self.senders]


class Nodes:
    """Ends on an engine's other machines, as `slimx.extras.multi_node.nodes.Nodes` calls them."""

    def __init__(self, ends: list[DirectEnd]):
        self.ends, self.count = ends, len(ends)

    async def transport(self, method: str, messages: Sequence[Any] | None = None) -> list[Any]:
        arguments = [()] * self.count if messages is None else [(message,) for message in messages]
        calls = (getattr(end, method)(*values) for end, values in zip(self.ends, arguments, strict=True))
        return await asyncio.gather(*calls)


class Engine(LocalRecipient):
    """An engine that keeps what its machines take: by rank its own tensors, or by machine those of its only target."""

    def __init__(self, name: str):
        self.name, self.ends = name, [DirectEnd() for _ in range(MACHINES[name])]
        self.received: dict[int, Tensors] = {}

    async def prepare(self) -> None:
        first, *others = self.ends
        for end in others:
            await end.prepare(HOST)
        await first.prepare(HOST, Nodes(others) if others else None)

    async def transport(self, method: str, *arguments: Any) -> Any:
        return await getattr(self.ends[0], method)(*arguments)

    async def receive(self, packed: PackedBucket, bucket: int) -> None:
        async with self.ends[0].landed(packed) as landed:
            paths = (landed.path, *landed.others)
            for number, path in enumerate(paths):
                target = number if len(landed.targets) > 1 else 0
                memory = open_memory(path, landed.size, private=True)
                check(landed, target, memory)
                for t in landed.targets[target]:
                    found = memory[t.offset : t.offset + t.nbytes].view(getattr(torch, t.dtype)).view(t.shape)
                    self.received.setdefault(number, {})[t.name] = found.clone()


@pytest.fixture(autouse=True)
def agents(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sender, receiver):
        monkeypatch.setattr(module, "Agent", MemoryAgent)


async def published(plan: Plan, ranks: int | None = None, *, staggered: bool = False) -> list[Engine]:
    trainers, engines = Trainers(plan), [Engine(name) for name in MACHINES]
    delivery = DirectDelivery(trainers, receivers_of(MACHINES, ranks), step_deadline_s=60, staggered=staggered)
    source = DirectSource(delivery)
    await delivery.begin(Manifest(policy="p", version=1, trainer_step=1, membership_epoch=1), plan.count)
    for engine in engines:
        await engine.prepare()
        await delivery.connect(engine, 1)
    for bucket in range(plan.count):
        packed = await source.gather(bucket)
        for engine in engines:
            await delivery.bring(engine, 1, packed, bucket)
    for rank_sender in trainers.senders:
        rank_sender.close()
    return engines


@pytest.mark.parametrize("staggered", [False, True])
async def test_each_machine_of_an_engine_receives_the_bytes_of_its_ranks(staggered: bool) -> None:
    for engine in await published(plan(), staggered=staggered):
        assert engine.received.keys() == set(range(ENGINE.world))
        for rank, found in engine.received.items():
            expected = dressed(engine_rank(SERVED["qwen"], checkpoint(MODEL), ENGINE, rank))
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], tensor.to(found[name].dtype)) for name, tensor in expected.items())


@pytest.mark.parametrize("staggered", [False, True])
async def test_each_machine_of_an_engine_takes_all_hugging_face_tensors(staggered: bool) -> None:
    by_name = compile_plan(
        MegatronLayout(MODEL.table, SIZES).parts(),
        checkpoint_parts(MODEL.table),
        precision=Precision("float32", "bfloat16"),
        bucket_bytes=8000,
    )
    expected = dressed(checkpoint(MODEL))
    for engine in await published(by_name, staggered=staggered):
        assert engine.received.keys() == set(range(MACHINES[engine.name]))
        for found in engine.received.values():
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in expected.items())


async def test_an_end_of_several_receivers_leaves_all_when_one_lacks_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = await published(plan(10**6))
    (end,) = engines[1].ends
    kept = end._receivers[0]
    left = []

    class Landing:
        """A receiver whose bucket has come."""

        def landed(self, packed: PackedBucket) -> Any:
            return self

        def __enter__(self) -> PackedBucket:
            return PackedBucket("path", 1, packed.targets[:1])

        def __exit__(self, *error: object) -> None:
            left.append(1)

    packed = PackedBucket("nixl:9/0", 64, ((), ()))
    kept.deadline_s = 0.1
    monkeypatch.setattr(end, "_receivers", [Landing(), kept])
    with refused("direct.missing"):
        async with end.landed(packed):
            pytest.fail("one of them lacks its bytes")
    assert left == [1]


async def test_a_cancelled_receipt_of_a_bucket_ends_its_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One receiver copies what has come, and its memory stays until it has; the other waits, and is asked to stop."""
    plans = plan(10**6)
    engines = await published(plans)
    ends = [end for engine in engines for end in engine.ends]
    copying, waiting = (end._receivers[0] for end in ends[:2])
    arrived, go_on = threading.Event(), threading.Event()
    seen: list[int] = []

    def put(*_: Any) -> None:
        arrived.set()
        assert go_on.wait(60)
        seen.append(len(copying._slots))

    monkeypatch.setattr(copying, "_wait", lambda *_: None)
    monkeypatch.setattr(copying, "_put", put)
    monkeypatch.setattr(ends[0], "_receivers", [copying, waiting])
    waiting.deadline_s = 600

    async def land() -> None:
        async with ends[0].landed(PackedBucket("nixl:9/0", 64, ((), (), (), ()))):
            pytest.fail("nothing has come")

    landing = asyncio.create_task(land())
    await until(arrived.is_set)
    landing.cancel()
    await until(copying._closed.is_set)
    assert not landing.done()
    go_on.set()
    async with asyncio.timeout(60):
        with pytest.raises(asyncio.CancelledError):
            await landing
    assert seen and all(seen), "its memory was there while it was copied"
    assert not copying._slots and waiting._closed.is_set()
    with refused("direct.closed"):
        async with ends[0].landed(PackedBucket("nixl:9/0", 64, ((), (), (), ()))):
            pytest.fail("it was given back")
