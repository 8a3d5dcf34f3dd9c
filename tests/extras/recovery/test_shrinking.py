"""Fewer ranks take the place of lost ones where there is no room for all, and train the same batches."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from slimx.config.rule import broken
from slimx.config.sections.publish import Publish
from slimx.errors import DeadlineError
from slimx.extras.recovery.ledger import check_close
from slimx.extras.recovery.rules import can_shrink
from slimx.extras.recovery.section import Recovery
from slimx.layout.ranks import Sizes, fewer
from slimx.orchestration.ranks.trainers import folded, unfolded
from tests.extras.recovery.recovery_stand import Stand, World
from tests.refusals import refused
from tests.unit.orchestration.checkpointing_stand import LAYOUT

pytestmark = pytest.mark.usefixtures("quick")


def test_data_parallel_ranks_shrink_by_whole_shards() -> None:
    def data(**sizes: int) -> list[int]:
        return [smaller.data for smaller in fewer(Sizes(**sizes))]

    assert data(data=8) == [4, 2, 1] and data(data=6) == [3, 2, 1] and data(data=1) == []
    assert data(data=8, expert=4) == [4] and data(data=2, expert=2) == []
    assert data(data=4, tensor=2, expert=2) == [2, 1] and data(data=4, expert=2, expert_tensor=2) == []


@pytest.mark.parametrize(
    ("sizes", "transport", "device", "problems"),
    [
        (Sizes(data=2), "memory", "cpu", 0),
        (Sizes(data=2, expert=2), "memory", "cpu", 1),
        (Sizes(data=2), "nixl", "cpu", 0),
        (Sizes(tensor=2), "nixl", "cuda", 2),
    ],
)
def test_unproven_or_impossible_shrinking_is_refused(sizes: Sizes, transport: str, device: str, problems: int) -> None:
    facts = {"publish": Publish(transport=transport), "sizes": sizes, "device": device}
    found = broken([can_shrink], facts | {"recovery": Recovery(trainers=1, shrink_after=9)})
    assert [problem.code for problem in found] == ["recovery.shrink_reach"] * problems
    assert list(broken([can_shrink], facts | {"recovery": Recovery(trainers=1)})) == []


def test_a_rank_for_several_takes_their_micro_batches_in_order() -> None:
    shards = [[f"{shard}{batch}" for batch in range(3)] for shard in range(4)]
    by_rank = folded(shards, 2)
    assert by_rank == [shards[0] + shards[1], shards[2] + shards[3]]
    assert unfolded(by_rank, 2) == shards


def test_sums_in_another_order_pass_and_another_state_does_not() -> None:
    recorded = {"optim/grad_norm": 2.0, "loss/policy": 0.0, "batch/padding": 1.0}
    check_close(1, recorded, {"optim/grad_norm": 2.001, "loss/policy": 1e-4, "batch/padding": 7.0})
    for name, value in (("optim/grad_norm", 2.1), ("loss/policy", 0.1), ("loss/policy", float("nan"))):
        with refused("recovery.differs", about=name):
            check_close(1, recorded, recorded | {name: value})


@pytest.fixture
async def stand(tmp_path: Path) -> Stand:
    world = World(tmp_path, replaced=3)
    world.config.recovery.shrink_after = 1.0
    return await Stand(tmp_path, world).open()


async def test_fewer_ranks_continue_from_the_checkpoint_if_places_are_lacking(stand: Stand, tmp_path: Path) -> None:
    world = stand.world
    await stand.train(0)
    await stand.save(1)
    await stand.checkpoints.settle()
    await stand.train(1)
    world.done.clear()
    world.places, world.shift, world.dies["train 2"] = 1, 1e-4, 1
    await stand.train(2)
    assert world.done == ["train 2", "start", "restore iter_0000001 into another layout", "train 1", "train 2"]
    assert stand.group.sizes.world == stand.checkpoints.sizes["actor"].world == 1
    assert stand.recovery.ledger.steps[1].metrics["loss"] == 1 + 1e-4
    # To the last bit from now on, and still from a checkpoint of other sizes.
    world.done.clear()
    world.dies["train 3"] = 1
    await stand.train(3)
    assert world.done[1:3] == ["start", "restore iter_0000001 into another layout"]
    world.shift, world.dies["train 4"] = 2e-4, 1
    with refused("recovery.differs", about="loss"):
        await stand.train(4)


async def test_an_interrupted_save_is_written_by_fewer_ranks(stand: Stand) -> None:
    world = stand.world
    await stand.train(0)
    world.writes = False
    await stand.save(1)
    world.writes, world.places, world.dies["train 1"] = True, 1, 1
    await stand.train(1)
    async with asyncio.timeout(60):
        await stand.checkpoints.settle()
    newest = stand.saves.newest()
    assert newest is not None and newest.name == "iter_0000001"
    found = json.loads((newest / "slimx" / "run.json").read_text())
    assert found["policies"]["actor"]["layout"]["data"] == 1 < LAYOUT.data
    assert stand.recovery.ledger.base.same_layout is not None


async def test_without_the_key_or_a_layout_that_fits_the_run_ends(tmp_path: Path) -> None:
    for after, places in ((None, 1), (1.0, 0)):
        world = World(tmp_path, replaced=1)
        world.config.recovery.shrink_after = after
        stand = await Stand(tmp_path, world).open()
        await stand.train(0)
        world.places, world.dies["train 1"] = places, 1
        with refused("deadline", kind=DeadlineError):
            await stand.train(1)
