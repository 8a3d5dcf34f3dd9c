"""Mirrors count once all ranks' states are proven; one that is lost is no reason to end a run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import xxhash

from slimx.extras.recovery import mirrors as mirroring
from slimx.extras.recovery.mirror_store import MirrorLost, MirrorStore
from slimx.extras.recovery.mirrors import Mirrors
from tests.extras.recovery.recovery_stand import Stand, World
from tests.refusals import refused
from tests.unit.orchestration.checkpointing_stand import state


def sent(store: MirrorStore, step: int, rank: int, data: bytes, *, spoilt: bool = False) -> None:
    """Sends bytes as a rank does."""
    store.begin(step, rank, len(data))
    array = np.frombuffer(data, np.uint8)
    for part in np.array_split(array + spoilt, 2):
        store.write(step, rank, part)
    store.finish(step, rank, xxhash.xxh3_128_hexdigest(data))


def test_a_store_holds_the_committed_step_and_the_one_that_comes_in() -> None:
    store = MirrorStore()
    for step in (2, 4):
        for rank in (0, 1):
            sent(store, step, rank, b"%d%d" % (step, rank))
        assert store.complete(step) == [0, 1]
        with refused("mirror.absent", about="trainer rank 0", kind=MirrorLost):
            store.describe(step, 0)
        store.commit(step)
        assert store.describe(step, 1) == (2, xxhash.xxh3_128_hexdigest(b"%d1" % step))
        assert bytes(store.read(step, 1, 0)) == b"%d1" % step
    sent(store, 6, 0, b"60")
    sent(store, 8, 0, b"80")
    assert sorted(store.states) == [(4, 0), (4, 1), (8, 0)], "what came in of step 6 is dropped, it was never whole"


def test_bytes_that_are_not_what_was_sent_are_never_whole() -> None:
    store = MirrorStore()
    with refused("mirror.differs", about="trainer rank 1", kind=MirrorLost):
        sent(store, 2, 1, b"state", spoilt=True)
    store.begin(2, 0, 5)
    store.write(2, 0, np.zeros(3, np.uint8))
    with refused("mirror.differs", about="trainer rank 0", kind=MirrorLost):
        store.finish(2, 0, xxhash.xxh3_128_hexdigest(bytes(5)))
    assert store.complete(2) == [] and store.states == {}


class FakeStore:
    """A store as an actor: `lost` ones answer like those whose process has ended."""

    def __init__(self, node: str):
        self.node, self.lost, self.store = node, False, MirrorStore()

    def __getattr__(self, method: str) -> SimpleNamespace:
        async def answer(*arguments: Any) -> Any:
            if self.lost:
                raise ray.exceptions.RayActorError
            return None if method == "ready" else getattr(self.store, method)(*arguments)

        return SimpleNamespace(remote=answer)


class Mirrored:
    """A run's recovery with mirrors, on two machines of one rank each."""

    def __init__(self, tmp_path: Path, world: World):
        self.stand = Stand(tmp_path, world)
        self.stores: list[FakeStore] = []
        self.notes: list[str] = []
        mirrors = Mirrors(self.stand.group, tmp_path, self.notes.append, launch=self._launch)
        self.mirrors = self.stand.recovery.mirrors = mirrors

    def _launch(self, node: str) -> FakeStore:
        self.stores.append(FakeStore(node))
        return self.stores[-1]

    async def take(self, step: int) -> None:
        await self.stand.mirror(step)
        await self.mirrors._coming


@pytest.fixture
async def mirrored(tmp_path: Path, quick: list[Any], monkeypatch: pytest.MonkeyPatch) -> Mirrored:
    async def kill(actors: Any) -> None: ...

    monkeypatch.setattr(mirroring, "kill", kill)
    out = Mirrored(tmp_path, World(tmp_path))
    await out.stand.open()
    return out


async def test_new_ranks_start_from_the_newest_mirrors_on_other_machines(
    mirrored: Mirrored,
) -> None:
    stand, world = mirrored.stand, mirrored.stand.world
    for step in range(3):
        await stand.train(step)
        if step < 2:
            await mirrored.take(step + 1)
    assert mirrored.mirrors.step == 2 and [store.node for store in mirrored.stores] == ["n0", "n1"]
    assert [sorted(store.store.states) for store in mirrored.stores] == [[(2, 1)], [(2, 0)]]
    world.done.clear()
    world.dies["train 3"] = 1
    await stand.train(3)
    assert world.done == ["train 3", "start", "mirror 2", "train 2", "train 3"]
    found = stand.recovery.metrics()
    assert (found["recovery/from_mirrors"], found["recovery/trained_again"]) == (1, 1)
    assert found["recovery/mirrored_step"] == 2 and stand.recovery.bases() == {0, 2}


async def test_without_mirrors_ranks_start_from_the_newest_checkpoint(mirrored: Mirrored) -> None:
    stand, world = mirrored.stand, mirrored.stand.world
    for step in range(2):
        await stand.train(step)
        await mirrored.take(step + 1)
    mirrored.stores[1].lost = True
    world.done.clear()
    world.dies["train 2"] = 1
    await stand.train(2)
    assert world.done == ["train 2", "start", "train 0", "train 1", "train 2"]
    assert mirrored.mirrors.step is None and stand.recovery.from_mirrors == 0
    await mirrored.take(3)
    assert mirrored.mirrors.step == 3 and len(mirrored.stores) == 4


async def test_a_set_that_does_not_become_whole_does_not_count(mirrored: Mirrored) -> None:
    stand = mirrored.stand
    await stand.train(0)
    await mirrored.take(1)
    await stand.train(1)
    stand.world.sends = 1
    await stand.mirror(2)
    stand.world.dies["train 2"], stand.world.sends = 1, 2
    stand.world.done.clear()
    await stand.train(2)
    assert stand.world.done == ["train 2", "start", "mirror 1", "train 1", "train 2"]


async def test_mirrors_beyond_a_save_that_must_be_written_again_are_passed_over(mirrored: Mirrored) -> None:
    stand, world = mirrored.stand, mirrored.stand.world
    await stand.train(0)
    world.writes = False
    await stand.with_retry(lambda: stand.checkpoints.save(state(1)))
    await stand.train(1)
    await mirrored.take(2)
    world.done.clear()
    world.writes, world.dies["train 2"] = True, 1
    await stand.train(2)
    async with asyncio.timeout(60):
        await stand.checkpoints.settle()
    assert world.done == ["train 2", "start", "train 0", "save 1", "train 1", "train 2"]
