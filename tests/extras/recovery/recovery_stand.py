"""Trainer ranks without processes, and the recovery of a run that has them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import xxhash

from slimx.cluster.restarts import Restart
from slimx.cluster.waiting import ActorDied
from slimx.errors import DeadlineError
from slimx.extras.recovery.mirror_store import MirrorLost
from slimx.extras.recovery.trainers import TrainerRecovery
from slimx.layout.ranks import Sizes
from slimx.observability.tracking.phases import Timeline
from slimx.orchestration.state.checkpoints import Checkpointer
from slimx.orchestration.state.saves import Saves
from slimx.runtime.ports import machine
from slimx.trainer.checkpoint import files
from slimx.trainer.checkpoint.files import Report
from tests.unit.orchestration.checkpointing_stand import LAYOUT, config, state

DIED = ActorDied("trainer rank 0 died", code="actor.died", about="trainer rank 0")


class World:
    """All ranks of all groups: `weights` are the steps in the living ones."""

    def __init__(self, tmp_path: Path, replaced: int = 2):
        self.config = config(tmp_path, every=2, asynchronous=True, verify="size").model_copy(
            update={"recovery": SimpleNamespace(trainers=replaced, mirror_every=1, shrink_after=None)}
        )
        self.done: list[str] = []
        self.dies: dict[str, int] = {}
        """Deaths that are to come, by the call in which they do."""
        self.shift = 0.0
        """Difference of the metrics that later groups compute."""
        self.sends = 2
        """Ranks whose states reach their mirrors."""
        self.places = 2
        """Ranks for which there is a place."""
        self.writes = True
        """True if ranks write their files."""


class Group:
    """Two ranks of `world`."""

    def __init__(self, world: World):
        self.world, self.config, self.sizes = world, world.config, LAYOUT
        self.step, self.calling, self.dead = 0, None, False
        self.name = "trainer"
        self.start_deadline_s = world.config.cluster.start_deadline or 300.0
        self.logs = [Path("0.log"), Path("1.log")]
        self.actors: list[Any] = [SimpleNamespace(ping=SimpleNamespace(remote=self._ping)) for _ in range(2)]
        self.started = [
            {"pid": os.getpid(), "machine": machine(), "node": f"n{rank}", "seconds": {"model": 0.0}}
            for rank in range(2)
        ]

    async def _ping(self) -> None:
        if self.dead:
            raise ray.exceptions.ActorDiedError

    def holder(self, rank: int) -> str:
        return f"trainer rank {rank}"

    def successor(self) -> Group:
        return self.fewer(self.sizes, {})

    def adopt(self, other: Group) -> None:
        self.step, self.dead, self.started = other.step, False, other.started
        self.sizes, self.actors = other.sizes, self.actors[: other.sizes.world]

    async def identify(self, deadline_s: float | None = None) -> None:
        if self.sizes.world > self.world.places:
            raise DeadlineError("the processes of the trainer ranks", deadline_s or 300, "trainer rank 1")

    async def placed(self) -> int:
        return self.world.places

    def fewer(self, sizes: Sizes, plans: Any) -> Group:
        other = Group(self.world)
        other.sizes, other.actors, other.started = sizes, other.actors[: sizes.world], other.started[: sizes.world]
        return other

    async def start(self) -> None:
        self._does("start")

    async def restore(self, path: Path, *, same_layout: bool, load_optimizer: bool) -> None:
        self._does(f"restore {path.name}" + " into another layout" * (not same_layout))
        self.step = int(path.name.removeprefix("iter_"))

    async def train_step(self, updates: Any, *, step: int, version: int) -> dict[str, float]:
        assert step == self.step, "trained out of order"
        self._does(f"train {step}")
        self.step += 1
        return {"loss": step + self.world.shift, "gap": float("nan")}

    async def save(self, path: Path, *, step: int) -> None:
        assert step == self.step
        self._does(f"save {step}")
        for rank in range(self.sizes.world):
            if self.world.writes:
                files.write_report(path, rank, Report({}, []))

    async def call(self, method: str, what: str, *, step: int, per_rank: Any = ()) -> None:
        """Runs operations of the mirror role."""
        stores = [store for (store,) in per_rank]
        match method:
            case "mirror.send":
                await self._send(stores, step)
            case "mirror.fetch":
                await self._fetch(stores, step)
            case "mirror.restore":
                self._does(f"mirror {step}")
                self.step = step

    async def _send(self, stores: Any, step: int) -> None:
        assert step == self.step
        for rank, fake in enumerate(stores[: self.world.sends]):
            if fake.lost:
                raise MirrorLost("gone", code="mirror.lost", about=f"trainer rank {rank}")
            data = np.full(3, step, np.uint8)
            fake.store.begin(step, rank, 3)
            fake.store.write(step, rank, data)
            fake.store.finish(step, rank, xxhash.xxh3_128_hexdigest(data))

    async def _fetch(self, stores: Any, step: int) -> None:
        for rank, fake in enumerate(stores):
            if fake.lost:
                raise MirrorLost("gone", code="mirror.lost", about=f"trainer rank {rank}")
            fake.store.describe(step, rank)

    def _does(self, what: str) -> None:
        if self.dead:
            raise DIED
        self.world.done.append(what)
        if self.world.dies.get(what, 0):
            self.world.dies[what] -= 1
            self.dead = True
            raise DIED


class Stand:
    """A run's recovery, with a loop that trains and saves."""

    def __init__(self, tmp_path: Path, world: World):
        self.world, self.group = world, Group(world)
        self.restarts: list[Restart] = []
        self.shrunk: list[str] = []
        table = SimpleNamespace(note=lambda text: None)
        records = SimpleNamespace(
            table=table, trainers_replaced=self.restarts.append, trainers_shrunk=self.shrunk.append
        )
        self.recovery = TrainerRecovery(self.group, records, tmp_path, lambda sizes: {})
        self.saves = Saves(tmp_path / "checkpoints", keep=2)
        self.checkpoints = Checkpointer({"actor": self.group}, self.saves, Timeline(tmp_path), lambda text: None)

    async def open(self) -> Stand:
        await self.recovery.open(self.checkpoints, 0, None, same_layout=True)
        return self

    async def train(self, step: int) -> None:
        metrics = await self.with_retry(lambda: self.group.train_step([], step=step, version=step))
        self.recovery.trained(step, step, [], metrics)

    async def mirror(self, step: int) -> None:
        await self.recovery.after_step(step, nullcontext)

    async def save(self, step: int) -> None:
        await self.with_retry(lambda: self.checkpoints.save(state(step)))

    async def with_retry(self, work: Callable[[], Awaitable[Any]]) -> Any:
        async with asyncio.timeout(60):
            return await self.recovery.with_retry(work)
