"""The ranks of one torch.distributed world as one object, and their GPUs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slimx.cluster.place import Actor, identity_of
from slimx.cluster.starting import start_deadline
from slimx.cluster.waiting import KILL_S, ask_ray, gather, kill
from slimx.config.schema import Config
from slimx.errors import DeadlineError, PartLost
from slimx.json_types import Json
from slimx.layout.ranks import Sizes, coordinates
from slimx.runtime.logs import begin_log
from slimx.runtime.tasks import cancelled
from slimx.trainer.worker import TrainerWorker

PLACED_S = 5.0
"""Deadline for a rank with a process to respond, in seconds."""
DOMAIN = "slimx-domain"
"""Label of a Ray node: its NVLink domain (scripts/launch/common.sh)."""
ORDER = "slimx-order"
"""Label of a Ray node: its number in the job."""


async def _result[T](reference: Awaitable[T]) -> T:
    return await reference


@dataclass(frozen=True, slots=True, eq=False)
class PendingCall:
    """A call that ranks are executing."""

    what: str
    ranks: dict[Awaitable[object], int]
    """Reference of the result -> rank that computes it."""


class RankGroup:
    """Ray actors that are called together; every call has a deadline."""

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
        """Creates the actors. `name`: of the group, in messages and logs. `config`: its `trainer` section is the
        group's. `roles`: of each rank (`slimx.trainer.rank.TrainerRank`)."""
        self.name = name
        self.config = config
        self.sizes = sizes
        self.logs = [log_dir / f"{name}-{rank}.log" for rank in range(sizes.world)]
        self.start_deadline_s = start_deadline(config, device)
        self._gpus: PackedGpus | None = None
        if device == "cuda":
            self._gpus = PackedGpus(name, sizes.world, cpus=config.trainer.threads, deadline_s=self.start_deadline_s)
        self._device = device
        self._roles = tuple(roles)
        self._worker = worker
        self.actors = self._launch()
        self.started: list[Json] = []
        """Start-up results by rank."""
        self._calls: list[PendingCall] = []

    def _launch(self) -> list[Actor]:
        """Creates actors for all ranks on the group's GPUs."""
        for log in self.logs:
            begin_log(log)
        remote_class: Actor = ray.remote(self._worker)
        values = self.config.model_dump(mode="json")
        actors = []
        for rank in range(self.sizes.world):
            gpus = {"num_gpus": 0} if self._gpus is None else self._gpus.options(rank)
            actor = remote_class.options(num_cpus=self.config.trainer.threads, **gpus)
            actors.append(actor.remote(rank, values, str(self.logs[rank]), self._device, self._roles))
        return actors

    def successor(self) -> Self:
        """Returns a group of new ranks on the same GPUs, not started yet; the ranks of this group have ended."""
        other = copy(self)
        other.actors = self._launch()
        other.started = []
        return other

    def adopt(self, successor: RankGroup) -> None:
        """Continues with the started ranks of `successor`."""
        self.actors = successor.actors
        self.started = successor.started

    async def start(self) -> list[Json]:
        """Starts all ranks; returns pids and adapters by rank."""
        limit = self.start_deadline_s
        references = [self.actors[0].rendezvous.remote()]
        (rendezvous,) = await self.answers(references, [0], f"the start of {self.holder(0)}", limit)
        starts = [actor.start.remote(rendezvous) for actor in self.actors]
        results = await self.answers(starts, range(self.sizes.world), f"the start of the {self.name} ranks", limit)
        self._merge_started(results)
        return self.started

    async def identify(self, deadline_s: float | None = None) -> None:
        """Adds process id, machine and Ray's node id to `started`, also for ranks that have not started yet: they have
        `deadline_s`, or `cluster.start_deadline`, to get a process."""
        references = [actor.__ray_call__.remote(identity_of) for actor in self.actors]
        what = f"the processes of the {self.name} ranks"
        limit = deadline_s or self.start_deadline_s
        self._merge_started(await self.answers(references, range(self.sizes.world), what, limit))

    def _merge_started(self, results: Sequence[Json]) -> None:
        previous = self.started or [{} for _ in results]
        self.started = [known | result for known, result in zip(previous, results, strict=True)]

    async def placed(self) -> int:
        """Returns the number of ranks that have a process."""
        tasks = [asyncio.ensure_future(_result(actor.__ray_call__.remote(identity_of))) for actor in self.actors]
        try:
            done, _ = await asyncio.wait(tasks, timeout=PLACED_S)
            return sum(task.exception() is None for task in done)
        finally:
            await cancelled(*tasks)

    async def stop(self) -> None:
        """Kills all ranks; does not raise."""
        await kill(self.actors)
        if self._gpus is not None:
            with suppress(DeadlineError, PartLost):
                await ask_ray("the release of GPUs", "Ray's GCS", KILL_S, self._gpus.release)

    def mark(self, text: str) -> None:
        """Writes a marker into the logs of all ranks, which the following lines belong to; does not wait."""
        for actor in self.actors:
            actor.mark.options(num_returns=0).remote(text)

    async def call(
        self,
        method: str,
        what: str,
        /,
        *,
        per_rank: Sequence[tuple[object, ...]] | None = None,
        ranks: Sequence[int] | None = None,
        **arguments: object,
    ) -> list[Any]:
        """Calls an operation, "role.method" (`slimx.trainer.operation`), on all ranks or on `ranks`; returns results in
        their order. `per_rank`: positional arguments of each rank; `arguments`: keyword arguments of all. `what` names
        the call in messages."""
        ranks = range(self.sizes.world) if ranks is None else ranks
        positional = per_rank or [()] * len(ranks)
        references = []
        for rank, values in zip(ranks, positional, strict=True):
            references.append(self.actors[rank].call.remote(method, *values, **arguments))
        return await self.answers(references, ranks, what)

    async def answers[T](
        self, references: Sequence[Awaitable[T]], ranks: Sequence[int], what: str, deadline_s: float | None = None
    ) -> list[T]:
        """Returns the results of calls to `ranks`, in their order; the ranks are busy with `what` meanwhile."""
        call = PendingCall(what, dict(zip(references, ranks, strict=True)))
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
        """Makes all ranks copy the state of `role` and start writing it; reports in `path` tell when that is done."""
        await self.call(f"{role}.save", f"the copy of the state for {path}", path=str(path), step=step)

    async def restore(self, path: Path, *, same_layout: bool, load_optimizer: bool, role: str = "model") -> None:
        """Restores `role` from the checkpoint in `path`."""
        await self.call(
            f"{role}.restore",
            f"loading the checkpoint {path}",
            path=str(path),
            same_layout=same_layout,
            load_optimizer=load_optimizer,
        )

    @property
    def calling(self) -> str | None:
        """Name of a call that ranks are executing; None between calls."""
        return self._calls[-1].what if self._calls else None

    def late(self) -> Json | None:
        """Returns {what: name of the current call, ranks: names of those that have not finished, logs: theirs, of: the
        number of called ranks}; None between calls."""
        if not self._calls:
            return None
        call = self._calls[-1]
        references = list(call.ranks)
        _, waiting = ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
        ranks = sorted(call.ranks[reference] for reference in waiting)
        return {
            "what": call.what,
            "ranks": [self.holder(rank) for rank in ranks],
            "logs": [str(self.logs[rank]) for rank in ranks],
            "of": len(references),
        }

    def holder(self, rank: int) -> str:
        """Returns the name of a rank in messages."""
        return f"{self.name} rank {rank}"

    async def stored(self, values: Sequence[object]) -> list[ray.ObjectRef]:
        """Puts each of `values` into Ray's object store once and returns the references. Raises DeadlineError if that
        takes too long."""
        deadline = self.config.trainer.deadline
        return await ask_ray("room for a batch", "Ray's raylet", deadline, lambda: [ray.put(value) for value in values])

    async def sharded(self, shards: Sequence[Sequence[object]]) -> list[tuple[ray.ObjectRef]]:
        """Returns the argument of each rank: its data-parallel shard, stored once for the ranks that share it."""
        stored = await self.stored(shards)
        return [(stored[coordinates(rank, self.sizes).data],) for rank in range(self.sizes.world)]

    def metrics_of[T](self, results: Sequence[T]) -> T:
        """Returns the metrics of the whole batch from those of all ranks: the last pipeline stage's first rank has
        them."""
        return results[self.sizes.stage * (self.sizes.pipeline - 1)]

    def by_shard[T](self, results: Sequence[Sequence[T]]) -> list[Sequence[T]]:
        """Returns per-token results by data-parallel shard, each from a rank of the last stage that has all of them."""
        last = self.sizes.stage * (self.sizes.pipeline - 1)
        return [results[last + data * self.sizes.tensor * self.sizes.context] for data in range(self.sizes.data)]


class PackedGpus:
    """GPUs for `count` ranks on as few machines as possible, reserved until `release`; consecutive ranks are on
    neighbouring GPUs.

    By default Ray spreads actors over machines once each is half full: tensor-parallel ranks would communicate over the
    network, and no machine would have all GPUs free for an engine."""

    def __init__(self, name: str, count: int, *, cpus: float, deadline_s: float):
        """Reserves the GPUs. `name`: of the group of ranks. Raises DeadlineError if they are not free within
        `deadline_s` seconds."""
        self._group: PlacementGroup = placement_group([{"GPU": 1, "CPU": cpus}] * count, strategy="PACK")
        self._released = False
        try:
            ray.get(self._group.ready(), timeout=deadline_s)
        except ray.exceptions.GetTimeoutError:
            self.release()
            raise DeadlineError(f"{count} GPUs for {name}", deadline_s, "other users of the Ray cluster") from None
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        order = {node: index for index, node in enumerate(in_order(ray.nodes()))}
        # Bundles of a machine need not be consecutive; ranks must be.
        self._bundles = sorted(range(count), key=lambda bundle: (order[nodes[bundle]], bundle))

    def options(self, rank: int) -> Json:
        """Returns options of the Ray actor of `rank`."""
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._bundles[rank])
        return {"num_gpus": 1, "scheduling_strategy": strategy}

    def release(self) -> None:
        """Releases the GPUs; actors on them end."""
        if not self._released:
            remove_placement_group(self._group)
            self._released = True


def in_order(nodes: Sequence[Json]) -> list[str]:
    """Returns ids of `ray.nodes()` with neighbours next to each other: by NVLink domain, number in the job, address."""

    def position(node: Json) -> tuple[str, str, str]:
        labels = node.get("Labels") or {}
        return labels.get(DOMAIN, ""), labels.get(ORDER, ""), node["NodeManagerAddress"]

    return [node["NodeID"] for node in sorted(nodes, key=position)]
