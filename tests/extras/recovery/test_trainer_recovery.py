"""Lost trainers are replaced by others that are where they were; a failure of trainers that are well is not."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slimx.config.rule import broken
from slimx.config.schema import Config
from slimx.config.sections.general import Schedule
from slimx.config.sections.publish import Publish
from slimx.data.batch import MicroBatch, TrainBatch
from slimx.errors import DeadlineError, SlimxError
from slimx.extras.recovery.ledger import Base, Ledger, TrainedStep, check_same
from slimx.extras.recovery.rules import recovers_with
from slimx.extras.recovery.section import Recovery
from tests.extras.recovery.recovery_stand import Stand, World
from tests.refusals import invalid, refused

pytestmark = pytest.mark.usefixtures("quick")
SFT = {"name": "sft"}


async def test_new_ranks_repeat_the_steps_since_the_checkpoint(
    tmp_path: Path, quick: list[Any], ended: list[Any]
) -> None:
    world = World(tmp_path)
    stand = await Stand(tmp_path, world).open()
    lost = stand.group.actors
    for step in (0, 1):
        await stand.train(step)
    await stand.save(2)
    await stand.checkpoints.settle()
    for step in (2, 3):
        await stand.train(step)
    world.done.clear()
    world.dies["train 4"] = 1
    await stand.train(4)
    again = ["start", "restore iter_0000002", "train 2", "train 3"]
    assert world.done == ["train 4", *again, "train 4"]
    assert quick == [{None: [os.getpid()] * 2}], "every rank, not only the one that died"
    assert ended == lost
    assert sorted(stand.recovery.ledger.steps) == [2, 3, 4]
    assert stand.recovery.metrics()["recovery/trainers"] == 1 and [restart.error for restart in stand.restarts] == [""]


async def test_ranks_lost_during_recovery_are_replaced_until_none_is_left(tmp_path: Path) -> None:
    world = World(tmp_path, replaced=3)
    stand = await Stand(tmp_path, world).open()
    await stand.train(0)
    world.dies |= {"train 1": 1, "start": 1, "train 0": 1}
    await stand.train(1)
    assert stand.recovery.replaced == 3
    assert [bool(restart.error) for restart in stand.restarts] == [True, True, False]
    world.dies["train 2"] = 1
    with refused("actor.died", about="trainer rank 0"):
        await stand.train(2)


async def test_a_failure_of_ranks_that_are_well_is_no_loss(tmp_path: Path) -> None:
    stand = await Stand(tmp_path, World(tmp_path)).open()

    async def fails() -> None:
        raise SlimxError("a parameter is not finite", code="optim.skipped")

    with refused("optim.skipped"):
        await stand.with_retry(fails)
    assert stand.recovery.replaced == 0


async def test_a_failure_that_a_death_caused_elsewhere_is_one(tmp_path: Path) -> None:
    stand = await Stand(tmp_path, World(tmp_path)).open()
    errors = [
        SlimxError("Connection closed by peer", code="actor.failed", about="trainer rank 0"),
        DeadlineError("step 1 of training", 5, "trainer rank 0, trainer rank 1"),
    ]

    async def broken() -> int:
        if not errors:
            return 7
        stand.group.dead = len(errors) == 2
        raise errors.pop(0)

    assert await stand.with_retry(broken) == 7
    assert stand.recovery.replaced == 2


async def test_different_results_of_new_ranks_end_the_run(tmp_path: Path) -> None:
    world = World(tmp_path)
    stand = await Stand(tmp_path, world).open()
    await stand.train(0)
    world.shift, world.dies["train 1"] = 2**-52, 1
    with refused("recovery.differs", about="loss"):
        await stand.train(1)
    with refused("recovery.differs", about="loss"):
        await stand.train(1)
    assert stand.recovery.replaced == 1


async def test_an_interrupted_save_is_written_by_new_ranks_at_its_step(tmp_path: Path) -> None:
    world = World(tmp_path)
    stand = await Stand(tmp_path, world).open()
    await stand.train(0)
    world.writes = False
    await stand.save(1)
    await stand.train(1)
    world.done.clear()
    world.writes, world.dies["train 2"] = True, 1
    await stand.train(2)
    async with asyncio.timeout(60):
        await stand.checkpoints.settle()
    assert world.done == ["train 2", "start", "train 0", "save 1", "train 1", "train 2"]
    assert stand.saves.newest() == tmp_path / "checkpoints/iter_0000001"
    assert sorted(stand.recovery.ledger.steps) == [1, 2]


async def test_the_watch_replaces_ranks_that_die_between_two_calls(tmp_path: Path) -> None:
    world = World(tmp_path, replaced=1)
    stand = await Stand(tmp_path, world).open()
    await stand.train(0)
    watching = asyncio.create_task(stand.recovery.watch())
    stand.group.dead = True
    async with asyncio.timeout(60):
        while stand.restarts == []:
            await asyncio.sleep(0.01)
        assert world.done == ["train 0", "start", "train 0"] and not watching.done()
        stand.group.dead = True
        final = await watching
    assert final.code == "actor.died"


async def test_before_the_run_is_open_a_loss_ends_it(tmp_path: Path) -> None:
    stand = Stand(tmp_path, World(tmp_path))
    stand.group.dead = True
    async with asyncio.timeout(60):
        assert (await stand.recovery.watch()).code == "actor.died"
    assert stand.restarts == []


def test_batches_are_kept_until_a_checkpoint_holds_their_step() -> None:
    ledger = Ledger()
    arrays = {
        "tokens": np.zeros(4, np.int64),
        "labels": np.zeros(4, np.int64),
        "weight": np.zeros(4, np.float32),
        "advantages": np.zeros(4, np.float32),
        "rollout_logprobs": np.zeros(4, np.float32),
        "versions": np.zeros(4, np.int64),
        "temperature": np.zeros(4, np.float32),
        "padding": np.zeros(4, bool),
    }
    batch = MicroBatch(**arrays, routed_experts=None, lengths=[4], rows=[0])
    update = TrainBatch(shards=[[batch], [batch]], tokens=8, imbalance=0.0)
    for step in range(3):
        ledger.trained(TrainedStep(step, step, [update], {}))
    assert ledger.nbytes == 3 * 2 * 4 * (3 * 8 + 4 * 4 + 1)
    ledger.rebase(Base(2, Path("iter_0000002")))
    assert sorted(ledger.steps) == [2]


def test_a_metric_that_is_missing_or_differs_in_its_last_bit_is_named() -> None:
    check_same(1, {"a": 0.1, "b": float("nan")}, {"a": 0.1, "b": float("nan")})
    for again in ({"a": 0.1}, {"a": 0.1, "b": float("nan")}, {"a": 0.1, "b": np.nextafter(1.0, 2)}):
        with refused("recovery.differs", about="b"):
            check_same(1, {"a": 0.1, "b": 1.0}, again)


@pytest.mark.parametrize(
    ("changed", "code", "about"),
    [
        ({"checkpoint": {"every": 0}}, "recovery.unbounded", "checkpoint.every"),
        ({"rollout": {"prompts": "p", "engines": []}, "algorithm": SFT}, "recovery.engines", "recovery.trainers"),
        ({"recovery": {"mirror_every": 2}}, "recovery.mirror", "recovery.mirror_every"),
        ({"checkpoint": {"every": 2, "load_optimizer": False}}, "unproven", "checkpoint.load_optimizer"),
        ({"schedule": {"colocate": True}}, "unproven", "schedule.colocate"),
        ({"critic": {}}, "unproven", "critic"),
        ({"policies": {"judge": {}}}, "unproven", "policies"),
    ],
)
def test_features_unproven_with_recovery_are_refused(changed: dict[str, Any], code: str, about: str) -> None:
    values: dict[str, Any] = {
        "run": {"dir": "r"},
        "model": {"path": "m"},
        "rollout": {"prompts": "p", "engines": [{"name": "actor"}]},
        "checkpoint": {"every": 2},
        "recovery": {"trainers": 1},
    }
    Config.model_validate(values)
    with invalid(code, about=about):
        Config.model_validate(values | changed)
    Config.model_validate(values | {"recovery": {}} | {"checkpoint": {}})


def test_untested_transports_are_refused_with_trainer_recovery() -> None:
    def found(transport: str, replaced: int, device: str = "cpu") -> list[str]:
        publish = Publish(transport=transport, staging="bucket")
        facts = {"recovery": Recovery(trainers=replaced), "publish": publish, "device": device, "schedule": Schedule()}
        return [problem.code for problem in broken([recovers_with], facts)]

    assert found("cuda_ipc", 1) == ["recovery.transport"]
    assert found("cuda_ipc", 0) == []
    assert found("nixl", 1, "cuda") == ["recovery.transport"]
    assert all(found(proven, 1) == [] for proven in ("memory", "disk", "nixl"))
