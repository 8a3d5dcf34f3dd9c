"""The ranks of one torch.distributed world as one object, and the GPUs that they run on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slimx.cluster.place import identity_of
from slimx.cluster.starting import start_deadline
from slimx.cluster.waiting import KILL_S, ask_ray, gather, kill
from slimx.config.schema import Config
from slimx.errors import DeadlineError, PartLost
from slimx.layout.ranks import Sizes, coordinates
from slimx.runtime.logs import begin_log
from slimx.runtime.tasks import cancelled
from slimx.trainer.worker import TrainerWorker

PLACED_S = 5.0
"""Seconds in which a rank that has a process says so."""
DOMAIN, ORDER = "slimx-domain", "slimx-order"
"""Labels of a Ray node: its NVLink domain, and its number in the job (scripts/launch/common.sh)."""


async def _result(reference: ray.ObjectRef) -> Any:
    return await reference


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call that ranks are busy with."""

    what: str
    ranks: dict[ray.ObjectRef, int]
    """By answer the rank that owes it."""


class RankGroup:
    """Ray actors that are called together, each call with a deadline."""

    def __init__(
        self,
        name: str,
        config: Config,
        sizes: Sizes,
        log_dir: Path,
        device: str,
        roles: Sequence[str],
        worker: type = TrainerWorker,
    ):
        """`name`: of the group, in messages and logs. `config`: its `trainer` section is the group's own. `roles`: of
        each rank (`slimx.trainer.rank.TrainerRank`)."""
        self.name, self.config, self.sizes = name, config, sizes
        self.logs = [log_dir / f"{name}-{rank}.log" for rank in range(sizes.world)]
        self.start_deadline_s = start_deadline(config, device)
        self._gpus = (
            PackedGpus(name, sizes.world, cpus=config.trainer.threads, deadline_s=self.start_deadline_s)
            if device == "cuda"
            else None
        )
        self._device, self._roles, self._worker = device, tuple(roles), worker
        self.actors = self._launch()
        self.started: list[dict[str, Any]] = []
        """Start-up answers of all ranks, by rank."""
        self._calls: list[Call] = []

    def _launch(self) -> list[Any]:
        """New actors for all ranks, in the places that the group has."""
        for log in self.logs:
            begin_log(log)
        actor, threads = ray.remote(self._worker), self.config.trainer.threads
        values = self.config.model_dump(mode="json")
        return [
            actor.options(num_cpus=threads, **(self._gpus.options(rank) if self._gpus else {"num_gpus": 0})).remote(
                rank, values, str(self.logs[rank]), self._device, self._roles
            )
            for rank in range(self.sizes.world)
        ]

    def successor(self) -> Self:
        """A group of new ranks in the same places, to be started; the ranks of this one have ended."""
        other = copy(self)
        other.actors, other.started = self._launch(), []
        return other

    def adopt(self, successor: RankGroup) -> None:
        """Go on with the ranks of `successor`, which have started."""
        self.actors, self.started = successor.actors, successor.started

    async def start(self) -> list[dict[str, Any]]:
        """Bring all ranks up; their pids and adapters, by rank."""
        limit = self.start_deadline_s
        asked = [self.actors[0].rendezvous.remote()]
        (where,) = await self.answers(asked, [0], f"the start of {self.holder(0)}", limit)
        starts = [actor.start.remote(where) for actor in self.actors]
        answers = await self.answers(starts, range(self.sizes.world), f"the start of the {self.name} ranks", limit)
        self.started = [known | one for known, one in zip(self.started or [{}] * len(answers), answers, strict=True)]
        return self.started

    async def identify(self, deadline_s: float | None = None) -> None:
        """Add the process, the machine and Ray's id of it to `started`, for ranks that may not have started yet; they
        have `deadline_s`, or `cluster.start_deadline`, to find a place."""
        asked = [actor.__ray_call__.remote(identity_of) for actor in self.actors]
        what, limit = f"the processes of the {self.name} ranks", deadline_s or self.start_deadline_s
        found = await self.answers(asked, range(self.sizes.world), what, limit)
        self.started = [started | one for started, one in zip(self.started or [{}] * len(found), found, strict=True)]

    async def placed(self) -> int:
        """The number of ranks that have a place and a process."""
        asked = [asyncio.ensure_future(_result(actor.__ray_call__.remote(identity_of))) for actor in self.actors]
        try:
            done, _ = await asyncio.wait(asked, timeout=PLACED_S)
            return sum(one.exception() is None for one in done)
        finally:
            await cancelled(*asked)

    async def stop(self) -> None:
        """End all ranks; does not raise."""
        await kill(self.actors)
        if self._gpus is not None:
            with suppress(DeadlineError, PartLost):
                await ask_ray("the release of GPUs", "Ray's GCS", KILL_S, self._gpus.release)

    def mark(self, text: str) -> None:
        """Write into the logs of all ranks what the lines that follow belong to; waits for nothing."""
        for actor in self.actors:
            actor.mark.options(num_returns=0).remote(text)

    async def call(
        self,
        method: str,
        what: str,
        /,
        *,
        each: Sequence[tuple[Any, ...]] | None = None,
        ranks: Sequence[int] | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """Call an operation, "role.method" (`slimx.trainer.operation`), on all ranks or on `ranks`; results in their
        order. `each`: positional arguments of each rank; `arguments`: of all of them. `what` names the call in
        messages."""
        ranks = range(self.sizes.world) if ranks is None else ranks
        references = [
            self.actors[rank].call.remote(method, *positional, **arguments)
            for rank, positional in zip(ranks, each or [()] * len(ranks), strict=True)
        ]
        return await self.answers(references, ranks, what)

    async def answers(
        self, references: Sequence[ray.ObjectRef], ranks: Sequence[int], what: str, deadline_s: float | None = None
    ) -> list[Any]:
        """Answers of `ranks` to calls that were sent, in their order; the ranks are busy with `what` meanwhile."""
        call = Call(what, dict(zip(references, ranks, strict=True)))
        self._calls.append(call)
        try:
            return await gather(
                references,
                what=what,
                holders=[self.holder(rank) for rank in ranks],
                deadline_s=deadline_s or self.config.trainer.deadline,
                logs=[self.logs[rank] for rank in ranks],
            )
        finally:
            self._calls.remove(call)

    async def save(self, path: Path, *, step: int, role: str = "model") -> None:
        """Have all ranks copy the state of `role` and start writing it; their reports in `path` tell the rest."""
        await self.call(f"{role}.save", f"the copy of the state for {path}", path=str(path), step=step)

    async def restore(self, path: Path, *, same_layout: bool, load_optimizer: bool, role: str = "model") -> None:
        """Bring `role` to the checkpoint in `path`."""
        options = {"same_layout": same_layout, "load_optimizer": load_optimizer}
        await self.call(f"{role}.restore", f"loading the checkpoint {path}", path=str(path), **options)

    @property
    def calling(self) -> str | None:
        """A call that ranks are busy with; None between two."""
        return self._calls[-1].what if self._calls else None

    def late(self) -> dict[str, Any] | None:
        """{what: of the call that goes on, ranks: names of those that have not answered, logs: theirs, of: how many
        were asked}; None between two calls."""
        if not self._calls:
            return None
        call = self._calls[-1]
        asked = list(call.ranks)
        _, waiting = ray.wait(asked, num_returns=len(asked), timeout=0, fetch_local=False)
        ranks = sorted(call.ranks[reference] for reference in waiting)
        return {
            "what": call.what,
            "ranks": [self.holder(rank) for rank in ranks],
            "logs": [str(self.logs[rank]) for rank in ranks],
            "of": len(asked),
        }

    def holder(self, rank: int) -> str:
        """Name of a rank in messages."""
        return f"{self.name} rank {rank}"

    async def stored(self, values: Sequence[Any]) -> list[ray.ObjectRef]:
        """References to `values`, each of which Ray's object store has once. Raises DeadlineError if it does not take
        them."""
        deadline = self.config.trainer.deadline
        return await ask_ray("room for a batch", "Ray's raylet", deadline, lambda: [ray.put(value) for value in values])

    async def sharded(self, shards: Sequence[Any]) -> list[tuple[Any]]:
        """Argument of each rank: its data-parallel shard, stored once for the ranks that share it."""
        stored = await self.stored(shards)
        return [(stored[coordinates(rank, self.sizes).data],) for rank in range(self.sizes.world)]

    def metrics_of(self, results: Sequence[Any]) -> Any:
        """The whole batch's metrics out of all ranks': those of the last pipeline stage's first rank."""
        return results[self.sizes.stage * (self.sizes.pipeline - 1)]

    def by_shard(self, results: Sequence[Any]) -> list[Any]:
        """Per-token results by data-parallel shard, from a rank of the last stage that has them whole."""
        last = self.sizes.stage * (self.sizes.pipeline - 1)
        return [results[last + data * self.sizes.tensor * self.sizes.context] for data in range(self.sizes.data)]


class PackedGpus:
    """GPUs for `count` ranks on as few machines as possible, reserved until `release`: neighbours in number are
    neighbours in place.

    Ray alone spreads actors over machines once each is half full; tensor-parallel ranks would then talk over the
    network, and no machine would be left whole for an engine."""

    def __init__(self, name: str, count: int, *, cpus: float, deadline_s: float):
        """`name`: of the group of ranks. Raises DeadlineError if they are not free within `deadline_s` seconds."""
        self._group: PlacementGroup | None = placement_group([{"GPU": 1, "CPU": cpus}] * count, strategy="PACK")
        try:
            ray.get(self._group.ready(), timeout=deadline_s)
        except ray.exceptions.GetTimeoutError:
            self.release()
            raise DeadlineError(f"{count} GPUs for {name}", deadline_s, "other users of the Ray cluster") from None
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        order = {node: number for number, node in enumerate(in_order(ray.nodes()))}
        # Bundles of a machine need not follow one another; ranks must.
        self._bundles = sorted(range(count), key=lambda bundle: (order[nodes[bundle]], bundle))

    def options(self, rank: int) -> dict[str, Any]:
        """Options of the Ray actor of `rank`."""
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._bundles[rank])
        return {"num_gpus": 1, "scheduling_strategy": strategy}

    def release(self) -> None:
        """Give the GPUs back; actors on them end."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


def in_order(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Ids of `ray.nodes()`, neighbours next to each other: by NVLink domain, number in the job, address."""

    def place(node: Mapping[str, Any]) -> tuple[str, str, str]:
        labels = node.get("Labels") or {}
        return labels.get(DOMAIN, ""), labels.get(ORDER, ""), node["NodeManagerAddress"]

    return [node["NodeID"] for node in sorted(nodes, key=place)]
