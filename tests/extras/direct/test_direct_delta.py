"""Changes alone travel between trainer ranks and engines, which hold bit for bit what whole runs would have brought."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from slimx.extras.direct.dealing import deal
from slimx.extras.direct.ends import receiver, sender
from slimx.extras.direct.ends.agent import LinkError
from slimx.extras.direct.ends.offer import HEADER, Offer, Region
from slimx.extras.planner.memory.publication import direct_memory
from slimx.reshard.packed import PackedBucket
from tests.extras.direct.direct_stand import EDGES, ENGINES, RANKS, MemoryAgent, Stand, take
from tests.refusals import refused
from tests.unit.layout.layout_stand import Tensors, trainer_shards
from tests.unit.reshard.gather_stand import MODEL, SIZES, WORLD, dressed


class Both:
    """The same trainers with engines that get whole runs, and engines that get what has changed."""

    def __init__(self, stack: ExitStack):
        self.trainers = [dressed(tensors) for tensors in trainer_shards(MODEL, SIZES)]
        self.whole = Stand(stack, trainers=self.trainers)
        self.changes = Stand(stack, trainers=self.trainers, item=2)

    def update(self, seed: int, share: float) -> None:
        """Makes an optimizer step: `share` of the elements of every tensor change, alike in all copies."""
        for tensors in self.trainers:
            for number, tensor in enumerate(tensors.values()):
                draw = torch.Generator().manual_seed(1000 * seed + number)
                moved = torch.rand(tensor.shape, generator=draw) < share
                tensor.add_(moved * torch.randn(tensor.shape, generator=draw))


@pytest.fixture
def both() -> Iterator[Both]:
    """Linked by memory. One thread: waking another takes longer than these tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patched:
        for module in (receiver, sender):
            patched.setattr(module, "Agent", MemoryAgent)
        yield Both(stack)
    torch.set_num_threads(threads)


def publish(stand: Stand, engines: range = range(ENGINES), *, missing: frozenset[int] = frozenset()) -> list[Tensors]:
    """Publishes to `engines`, of which those in `missing` do not look at the last bucket; returns what came by engine
    and rank."""
    transfer = stand.next()
    attested = {number: stand.receivers[number].bases() or [0] * stand.plan.count for number in engines}
    received: list[Tensors] = [{} for _ in range(ENGINES * RANKS)]
    for bucket in range(stand.plan.count):
        packed = stand.send(bucket, transfer, bases={number: bases[bucket] for number, bases in attested.items()})
        for number in engines:
            if number in missing and bucket == stand.plan.count - 1:
                continue
            with stand.receivers[number].landed(packed) as landed:
                for rank in range(RANKS):
                    received[number * RANKS + rank] |= take(landed, rank)
    return received


@pytest.mark.parametrize("steps", [25, pytest.param(100, marks=pytest.mark.slow("100 publications"))])
def test_step_after_step_changes_bring_what_whole_runs_bring(both: Both, steps: int) -> None:
    draw, sent = np.random.default_rng(0), []
    lost, incomplete = steps * 2 // 5, steps * 3 // 5
    for step in range(steps):
        both.update(step, float(draw.choice([0.0, 0.001, 0.02, 0.9])))
        if step == lost:  # an engine is lost, and comes back two publications later with nothing
            both.changes.receivers[1].close()
            both.changes.receivers[1] = both.changes.receiver(1, f"again-{time.monotonic_ns()}")
        engines = range(1) if lost <= step < lost + 2 else range(ENGINES)
        if step == lost + 2:
            both.changes.connect(1)
        # One that did not take the last bucket of a publication gets that bucket whole with the next one.
        missing = frozenset({0}) if step == incomplete else frozenset()
        both.whole.wire = both.changes.wire = 0
        came, expected = publish(both.changes, engines, missing=missing), publish(both.whole)
        for number in engines:
            for rank in range(number * RANKS, (number + 1) * RANKS):
                if number not in missing:
                    assert came[rank].keys() == expected[rank].keys()
                for name, tensor in came[rank].items():
                    assert torch.equal(tensor, expected[rank][name]), (step, rank, name)
        sent.append(both.changes.wire / both.whole.wire)
    headers = 1.1
    assert 1.0 < sent[0] < headers, "the first publication is whole"
    assert 0.5 < sent[lost + 2] < headers, "half of it, or more, is for the engine that came back"
    assert sent[lost + 1] < 0.5 and 0.0 < min(sent) < 0.1


def test_changes_travel_over_nixl() -> None:
    pytest.importorskip("nixl_cu13", reason="NIXL is not installed (requirements/cpu.txt pins it)")
    with ExitStack() as stack:
        trainers = [dressed(tensors) for tensors in trainer_shards(MODEL, SIZES)]
        stand = Stand(stack, trainers=trainers, item=2)
        whole = publish(stand)
        sent, stand.wire = stand.wire, 0
        trainers[0]["decoder.final_layernorm.weight"].mul_(2.0)
        for tensors in trainers[1:]:
            tensors["decoder.final_layernorm.weight"].copy_(trainers[0]["decoder.final_layernorm.weight"])
        came = publish(stand)
        assert 0 < stand.wire < 0.2 * sent
        for before, after in zip(whole, came, strict=True):
            differ = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
            assert differ == {"model.norm.weight"}


def test_a_plan_knows_the_memory_of_both_ends(both: Both) -> None:
    publish(both.changes)
    dealt = deal(both.changes.plan, engines=ENGINES)
    planned = direct_memory(dealt, ranks=WORLD, edges=EDGES, delta=True)
    kept = (sum(len(run) for _, run in rank._sent._runs.values()) + len(rank._packed) for rank in both.changes.senders)
    assert planned.kept == pytest.approx(max(kept), rel=0.2)
    received = sum(run.nbytes for run in both.changes.receivers[0].offer().runs)
    assert planned.received == pytest.approx(received, rel=0.05)
    assert direct_memory(dealt, ranks=WORLD, edges=EDGES)[2:] == (0, 0)


@pytest.fixture
def coming(both: Both) -> PackedBucket:
    """Bucket 0 of a publication of changes that has come, but was not looked at yet."""
    publish(both.changes)
    both.update(7, 0.05)
    bases = {number: engine.bases()[0] for number, engine in enumerate(both.changes.receivers)}
    packed = both.changes.send(0, both.changes.next(), bases=bases)
    return packed


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("base", 10**6, "direct.base"),
        ("length", -1, "direct.frame"),
        ("length", 2**40, "direct.frame"),
        ("length", 3, "direct.frame"),
    ],
)
def test_a_malformed_delta_is_refused_and_the_next_one_is_complete(
    both: Both, coming: PackedBucket, field: str, value: int, code: str
) -> None:
    engine = both.changes.receivers[0]
    run = next(run for run in engine.offer().runs if run.bucket == 0)
    place = engine._slots[0][run.offset : run.offset + HEADER.itemsize]
    place.numpy().view(HEADER)[field] = value
    with refused(code, about=f"trainer rank {run.source}", kind=LinkError), engine.landed(coming):
        pytest.fail("it was taken")
    assert engine.bases()[0] == 0 != engine.bases()[1]
    assert all(publish(both.changes)[rank] for rank in range(RANKS)), "each tensor is proven by its checksum"


def test_bytes_that_changed_in_an_engine_fail_its_verification(both: Both, coming: PackedBucket) -> None:
    """Sums are of whole tensors: kept bytes are proven as received ones are."""
    engine = both.changes.receivers[0]
    run = next(run for run in engine.offer().runs if run.bucket == 0 and run.rank == 0)
    engine._received.run(run)[:] ^= 1
    with engine.landed(coming) as landed, refused("peer.checksum"):
        take(landed, 0)
    engine._received.bases[0] = 0  # as of an engine that was started again
    publish(both.changes)


def test_an_engine_that_expects_whole_runs_is_refused(both: Both) -> None:
    offer = both.whole.receivers[0].offer().of(0)
    with refused("direct.sizes", about=offer.engine):
        both.changes.senders[0].connect(0, offer)
    both.changes.connect(0)
    with refused("direct.item", about="e"):
        Offer.from_bytes(Offer("e", b"", (Region(4096, 128),), (), 3).to_bytes())
