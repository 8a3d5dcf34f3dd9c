"""Trainer ranks write straight into the memory of every engine: NIXL's own agents, on loopback."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import msgspec
import numpy as np
import psutil
import pytest
import torch

from slimx.extras.direct.dealing import deal
from slimx.extras.direct.ends.agent import Agent, LinkError, Transfer, devices_at
from slimx.extras.direct.ends.offer import Notice, Offer, PackedRun, Region
from slimx.extras.direct.ends.sender import DirectSender
from slimx.extras.planner.memory.publication import direct_memory
from tests.extras.direct.direct_stand import DEADLINE_S, EDGES, ENGINES, HOST, RANKS, Stand, take
from tests.refusals import numbers, refused
from tests.unit.layout.engine_stand import SERVED, engine_rank
from tests.unit.layout.layout_stand import Tensors, checkpoint
from tests.unit.reshard.gather_stand import ENGINE, MODEL, WORLD, dressed

pytest.importorskip("nixl_cu13", reason="NIXL is not installed (requirements/cpu.txt pins it)")


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    """Yields one stand for all tests; each leaves both engines connected."""
    with ExitStack() as stack:
        yield Stand(stack)


def test_engine_ranks_get_their_bytes_from_ranks_that_share_the_work(stand: Stand) -> None:
    received: list[list[Tensors]] = [[{} for _ in range(RANKS)] for _ in range(ENGINES)]
    # A bucket is sent before the one before it is taken, twice over: slots are used again.
    for transfer in (stand.next(), stand.next()):
        coming = [stand.send(0, transfer)]
        for bucket in range(stand.plan.count):
            if bucket + 1 < stand.plan.count:
                coming.append(stand.send(bucket + 1, transfer))
            for number, receiver in enumerate(stand.receivers):
                with receiver.landed(coming[bucket]) as landed:
                    for rank in range(RANKS):
                        received[number][rank] |= take(landed, rank)
    assert stand.plan.count > 2
    whole = checkpoint(MODEL)
    for number in range(ENGINES):
        for rank in range(RANKS):
            tensors = engine_rank(SERVED["qwen"], whole, ENGINE, rank)
            assert received[number][rank].keys() == tensors.keys()
            for name, tensor in tensors.items():
                expected = dressed({name: tensor})[name].to(received[number][rank][name].dtype)
                assert torch.equal(received[number][rank][name], expected), name
    sent = {int(source) for source in np.unique(stand.dealt.moved["source"])}
    assert sent == set(range(WORLD))


def test_a_plan_knows_the_memory_that_both_ends_register(stand: Stand) -> None:
    planned = direct_memory(deal(stand.plan, engines=ENGINES), ranks=WORLD, edges=EDGES)
    ring = max(sum(map(len, sender._ring)) for sender in stand.senders)
    landing = sum(slot.nbytes for slot in stand.receivers[0].offer().slots)
    # The stand deals in smaller parts than a run; what else differs is padding to 16 bytes.
    assert planned.ring == pytest.approx(ring, rel=0.15)
    assert planned.landing == pytest.approx(landing, rel=0.05)
    assert planned.landing > planned.ring > 0


def test_bytes_that_do_not_come_are_counted_and_their_ranks_named(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = stand.receivers[0]
    monkeypatch.setattr(receiver, "deadline_s", 1.0)
    packed = stand.send(0, stand.next(), ranks=range(1, WORLD))
    with pytest.raises(LinkError) as error, receiver.landed(packed):
        pytest.fail("rank 0 sent nothing")
    assert (error.value.code, error.value.about) == ("direct.missing", "trainer rank 0")
    runs = [run for run in receiver.offer().runs if run.bucket == 0]
    lacking = sum(run.nbytes for run in runs if run.source == 0)
    assert 0 < lacking < sum(run.nbytes for run in runs)
    assert {lacking, sum(run.nbytes for run in runs)} <= set(numbers(error.value))


def test_an_older_publications_bytes_are_not_taken_for_this_ones(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand.receivers[1], "deadline_s", 1.0)
    late = stand.send(0, stand.next())
    with refused("direct.missing"), stand.receivers[1].landed(replace(late, path=f"nixl:{stand.next()}/0")):
        pytest.fail("nothing came of this publication")


def test_an_older_publications_write_that_ends_late_is_found_by_the_proof(stand: Stand) -> None:
    """Its bytes come into the slot after this publication's: the checksums are this one's, and nothing of it serves."""
    late, packed = stand.next(), stand.send(0, stand.next())
    sender, receiver = stand.senders[0], stand.receivers[0]
    for trainer in stand.senders:
        writes = [write for engine in trainer.engines.values() for write in engine.writes.values()]
        ended(
            trainer, lambda writes=writes: all(write.transfer is not None and write.transfer.done for write in writes)
        )
    engine = sender.engines[0]
    run, place = engine.runs[0][0], engine.offer.slots[0]
    with sender._lock:
        stale = sender.agent.register(run.nbytes).fill_(7)
        here = [Region(stale.data_ptr(), run.nbytes)]
        there = [Region(place.address + run.offset, run.nbytes, place.device)]
        write = sender.agent.write(engine.peer, here, there, Notice(late, 0, 0).to_bytes())
    ended(sender, lambda: write.done)
    with receiver.landed(packed) as landed:
        with refused("peer.checksum"):
            take(landed, run.rank)
        assert (late, 0) not in receiver._arrived, "its notice is not counted"
    again = stand.send(0, stand.next())
    with receiver.landed(again) as landed:
        assert take(landed, run.rank)


def test_a_write_gives_its_handle_back_when_its_slot_is_used_again(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = []
    release = Transfer.drop

    def drop(transfer: Transfer) -> None:
        released.append(transfer)
        release(transfer)

    stand.send(0, stand.next())
    engines = [(sender, engine) for sender in stand.senders for engine in sender.engines.values()]
    first = [(sender, engine.writes[0]) for sender, engine in engines if 0 in engine.writes]
    for sender, write in first:
        ended(sender, lambda write=write: write.transfer is not None and write.transfer.done)
    monkeypatch.setattr(Transfer, "drop", drop)
    stand.send(0, stand.next())
    assert first and released == [write.transfer for _, write in first]


def ended(sender: DirectSender, done: Callable[[], bool]) -> None:
    """Waits until writes of `sender` are `done`."""
    ends = time.monotonic() + DEADLINE_S
    while True:
        with sender._lock:
            if done():
                return
        assert time.monotonic() < ends
        time.sleep(0.001)


def test_a_restarted_engine_gets_new_memory_and_the_other_continues(stand: Stand) -> None:
    stand.receivers[1].close()
    stand.receivers[1] = stand.receiver(1, f"again-{time.monotonic_ns()}")
    stand.connect(1)
    packed = stand.send(0, stand.next())
    for receiver in stand.receivers:
        with receiver.landed(packed) as landed:
            assert all(take(landed, rank) for rank in range(RANKS))


def test_an_engine_that_expects_other_bytes_is_refused_before_any_is_sent(stand: Stand) -> None:
    offer = stand.receivers[0].offer().of(0)
    wrong = tuple(msgspec.structs.replace(run, nbytes=run.nbytes - 16) for run in offer.runs)
    with refused("direct.sizes", about=offer.engine):
        stand.senders[0].connect(0, msgspec.structs.replace(offer, runs=wrong))
    stand.connect(0)


@pytest.mark.parametrize(
    ("run", "code"),
    [
        (PackedRun(0, 0, 0, 100, 29), "direct.extent"),
        (PackedRun(0, 0, 0, -1, 4), "direct.extent"),
        (None, "direct.offer"),
    ],
    ids=str,
)
def test_an_offer_of_memory_that_is_not_there_is_refused(run: PackedRun | None, code: str) -> None:
    data = Offer("e", b"", (Region(4096, 128),), (run,)).to_bytes() if run else b"\x93abc"
    with refused(code):
        Offer.from_bytes(data)


def test_ranks_whose_copies_have_come_apart_are_found_out(stand: Stand) -> None:
    parameters = stand.senders[0].packer.parameters
    before = {name: tensor.clone() for name, tensor in parameters.items()}
    for tensor in parameters.values():
        tensor.add_(1.0)
    with refused("direct.copies"):
        stand.send(0, stand.next())
    for name, tensor in parameters.items():
        tensor.copy_(before[name])


def test_a_malformed_notice_is_ignored() -> None:
    assert Notice.from_bytes(Notice(1, 2, 3).to_bytes()) == Notice(1, 2, 3)
    assert Notice.from_bytes(b"") is None and Notice.from_bytes(b"\x93\x01\x02\xa1x") is None


def test_an_agents_thread_waits_for_events() -> None:
    agent = Agent(f"waiting-{time.monotonic_ns()}", HOST)
    process = psutil.Process()
    began = sum(process.cpu_times()[:2])
    time.sleep(2)
    assert sum(process.cpu_times()[:2]) - began < 1, "seconds of a core; a thread that polls would take two"
    agent.close()


def test_metadata_of_no_agent_are_refused() -> None:
    agent = Agent(f"lonely-{time.monotonic_ns()}", HOST)
    with refused("direct.metadata", about=agent.name, kind=LinkError):
        agent.meet(b"not an agent")
    agent.close()


def test_transfers_on_loopback_use_its_device_alone() -> None:
    assert devices_at(HOST) == devices_at("127.0.1.1") == devices_at("::1") == ["lo"]
    with refused("direct.interface", about="198.51.100.7"):
        devices_at("198.51.100.7")
