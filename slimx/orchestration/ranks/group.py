"""The ranks of one torch.distributed world, which are called together, and the reservation of their GPUs."""

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
from slimx.errors import DeadlineError, PartLost, counted
from slimx.json_types import Json
from slimx.layout.ranks import Sizes, coordinates
from slimx.runtime.logs import begin_log
from slimx.runtime.tasks import cancelled
from slimx.trainer.worker import TrainerWorker

PLACED_S = 5.0
"""Seconds to wait for responses when counting the ranks whose processes Ray has started."""
DOMAIN = "slimx-domain"
"""Key of the Ray node label that contains the node's NVLink domain (set by scripts/launch/common.sh)."""
ORDER = "slimx-order"
"""Key of the Ray node label that contains the node's number in the cluster job."""


async def _result[T](reference: Awaitable[T]) -> T:
    return await reference


@dataclass(frozen=True, slots=True, eq=False)
class PendingCall:
    """A call to several ranks that has not finished on all of them yet."""

    description: str
    ranks: dict[Awaitable[object], int]
    """Rank that computes each result, by Ray's reference to the result."""


class RankGroup:
    """The Ray actors of one torch.distributed world, which are called together. Every call has a deadline."""

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
        """Creates the actors without starting the ranks, and on CUDA reserves their GPUs. `name`: name of the group in
        messages and log files. `config`: configuration whose `trainer` section describes this group. `roles`: what each
        rank contains, such as "model" and "critic" (`slimx.trainer.rank.TrainerRank`)."""
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
        """Information about each rank, merged from the results of `start` and `identify`, such as its process id; []
        until one of them returns."""
        self._calls: list[PendingCall] = []

    def _launch(self) -> list[Actor]:
        """Creates the actors of all ranks on the GPUs that the group has reserved."""
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
        """Returns a group with new, unstarted ranks on the same GPUs. The ranks of this group must have ended."""
        other = copy(self)
        other.actors = self._launch()
        other.started = []
        return other

    def adopt(self, successor: RankGroup) -> None:
        """Replaces the ranks of this group with the started ranks of `successor`."""
        self.actors = successor.actors
        self.started = successor.started

    async def start(self) -> list[Json]:
        """Starts all ranks; returns information about each, such as its process id and machine."""
        limit = self.start_deadline_s
        references = [self.actors[0].rendezvous.remote()]
        (rendezvous,) = await self.answers(references, [0], f"the startup of {self.holder(0)}", limit)
        starts = [actor.start.remote(rendezvous) for actor in self.actors]
        results = await self.answers(starts, range(self.sizes.world), f"the startup of the {self.name} ranks", limit)
        self._merge_started(results)
        return self.started

    async def identify(self, deadline_s: float | None = None) -> None:
        """Adds the process id, machine and Ray node id of each rank to `started`. The ranks need not have been started,
        but Ray must create their processes within `deadline_s` seconds (default: the deadline for starting ranks)."""
        references = [actor.__ray_call__.remote(identity_of) for actor in self.actors]
        description = f"the processes of the {self.name} ranks"
        limit = deadline_s or self.start_deadline_s
        self._merge_started(await self.answers(references, range(self.sizes.world), description, limit))

    def _merge_started(self, results: Sequence[Json]) -> None:
        previous = self.started or [{} for _ in results]
        self.started = [known | result for known, result in zip(previous, results, strict=True)]

    async def placed(self) -> int:
        """Returns the number of ranks that have a process, that is, for which Ray has found resources."""
        tasks = [asyncio.ensure_future(_result(actor.__ray_call__.remote(identity_of))) for actor in self.actors]
        try:
            done, _ = await asyncio.wait(tasks, timeout=PLACED_S)
            return sum(task.exception() is None for task in done)
        finally:
            await cancelled(*tasks)

    async def stop(self) -> None:
        """Kills all ranks and releases their GPUs. Does not raise."""
        await kill(self.actors)
        if self._gpus is not None:
            with suppress(DeadlineError, PartLost):
                await ask_ray("the release of GPUs", "Ray's GCS", KILL_S, self._gpus.release)

    def mark(self, text: str) -> None:
        """Writes a marker line into the logs of all ranks, and returns without waiting for the ranks. `text`: the step
        and phase to which the following lines belong."""
        for actor in self.actors:
            actor.mark.options(num_returns=0).remote(text)

    async def call(
        self,
        method: str,
        description: str,
        /,
        *,
        per_rank: Sequence[tuple[object, ...]] | None = None,
        ranks: Sequence[int] | None = None,
        **arguments: object,
    ) -> list[Any]:
        """Calls an operation, named "role.method" (`slimx.trainer.operation`), on all ranks or on `ranks`, and returns
        the results in the order of the ranks. `per_rank`: positional arguments of each rank. `arguments`: keyword
        arguments, the same for all ranks. `description`: the call as a noun phrase, for messages."""
        ranks = range(self.sizes.world) if ranks is None else ranks
        positional = per_rank or [()] * len(ranks)
        references = []
        for rank, values in zip(ranks, positional, strict=True):
            references.append(self.actors[rank].call.remote(method, *values, **arguments))
        return await self.answers(references, ranks, description)

    async def answers[T](
        self,
        references: Sequence[Awaitable[T]],
        ranks: Sequence[int],
        description: str,
        deadline_s: float | None = None,
    ) -> list[T]:
        """Waits for calls that were sent to `ranks`, and returns the results in the order of `ranks`. During the wait,
        `description` is reported as the current call. Raises DeadlineError naming the ranks that miss the deadline
        (default: `trainer.deadline`)."""
        call = PendingCall(description, dict(zip(references, ranks, strict=True)))
        self._calls.append(call)
        try:
            return await gather(
                references,
                what=description,
                holders=[self.holder(rank) for rank in ranks],
                deadline_s=deadline_s or self.config.trainer.deadline,
                logs=[self.logs[rank] for rank in ranks],
            )
        finally:
            self._calls.remove(call)

    async def save(self, path: Path, *, step: int, role: str = "model") -> None:
        """Makes all ranks copy the state of `role` and start writing it into the checkpoint directory `path`. Returns
        when the copies are made; each rank writes a report into `path` when its files are complete."""
        await self.call(f"{role}.save", f"the copying of the state for checkpoint {path}", path=str(path), step=step)

    async def restore(self, path: Path, *, same_layout: bool, load_optimizer: bool, role: str = "model") -> None:
        """Restores the state of `role` on all ranks from the checkpoint in `path`. `same_layout`: True if ranks with
        the same parallel sizes wrote the checkpoint."""
        await self.call(
            f"{role}.restore",
            f"the loading of checkpoint {path}",
            path=str(path),
            same_layout=same_layout,
            load_optimizer=load_optimizer,
        )

    @property
    def calling(self) -> str | None:
        """Description of the most recent call that ranks are still executing; None between calls."""
        return self._calls[-1].description if self._calls else None

    def late(self) -> Json | None:
        """Returns a dict about the current call, which `slimx status` shows; None between calls. Key `what`:
        description of the call; `ranks` and `logs`: names and log files of the ranks that have not finished; `of`:
        number of ranks called."""
        if not self._calls:
            return None
        call = self._calls[-1]
        references = list(call.ranks)
        _, waiting = ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
        ranks = sorted(call.ranks[reference] for reference in waiting)
        return {
            "what": call.description,
            "ranks": [self.holder(rank) for rank in ranks],
            "logs": [str(self.logs[rank]) for rank in ranks],
            "of": len(references),
        }

    def holder(self, rank: int) -> str:
        """Returns the name of `rank` for messages."""
        return f"{self.name} rank {rank}"

    async def stored(self, values: Sequence[object]) -> list[ray.ObjectRef]:
        """Stores each of `values` once in Ray's object store and returns the references. Raises DeadlineError if Ray
        does not find memory for the values within `trainer.deadline`."""
        deadline = self.config.trainer.deadline
        return await ask_ray(
            "memory for a batch in Ray's object store",
            "Ray's raylet",
            deadline,
            lambda: [ray.put(value) for value in values],
        )

    async def sharded(self, shards: Sequence[Sequence[object]]) -> list[tuple[ray.ObjectRef]]:
        """Returns the positional argument of each rank: a reference to its data-parallel shard. Ranks with the same
        shard share one stored object."""
        stored = await self.stored(shards)
        return [(stored[coordinates(rank, self.sizes).data],) for rank in range(self.sizes.world)]

    def metrics_of[T](self, results: Sequence[T]) -> T:
        """Selects the metrics of the whole batch from the results of all ranks: the result of the first rank of the
        last pipeline stage."""
        return results[self.sizes.stage * (self.sizes.pipeline - 1)]

    def by_shard[T](self, results: Sequence[Sequence[T]]) -> list[Sequence[T]]:
        """Selects the per-token results of each data-parallel shard, from a rank of the last pipeline stage that has
        all tokens of the shard."""
        last = self.sizes.stage * (self.sizes.pipeline - 1)
        return [results[last + data * self.sizes.tensor * self.sizes.context] for data in range(self.sizes.data)]


class PackedGpus:
    """Reservation of GPUs for `count` ranks on as few machines as possible. Consecutive ranks are placed on neighboring
    GPUs.

    By default, Ray spreads actors over machines once each machine is half full. Tensor-parallel ranks would then
    communicate over the network, and no machine would have all GPUs free for an engine."""

    def __init__(self, name: str, count: int, *, cpus: float, deadline_s: float):
        """Reserves the GPUs, each with `cpus` CPU cores. `name`: name of the group of ranks, for messages. Raises
        DeadlineError if the GPUs are not free within `deadline_s` seconds."""
        self._group: PlacementGroup = placement_group([{"GPU": 1, "CPU": cpus}] * count, strategy="PACK")
        self._released = False
        try:
            ray.get(self._group.ready(), timeout=deadline_s)
        except ray.exceptions.GetTimeoutError:
            self.release()
            raise DeadlineError(
                f"{counted(count, 'GPU')} for {name}", deadline_s, "other users of the Ray cluster"
            ) from None
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        order = {node: index for index, node in enumerate(in_order(ray.nodes()))}
        # Ray may number the bundles of a machine in any order; the ranks of a machine must be consecutive.
        self._bundles = sorted(range(count), key=lambda bundle: (order[nodes[bundle]], bundle))

    def options(self, rank: int) -> Json:
        """Returns the Ray options that place the actor of `rank` on its GPU."""
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._bundles[rank])
        return {"num_gpus": 1, "scheduling_strategy": strategy}

    def release(self) -> None:
        """Ends the reservation and kills the actors that are still running on the GPUs."""
        if not self._released:
            remove_placement_group(self._group)
            self._released = True


def in_order(nodes: Sequence[Json]) -> list[str]:
    """Returns the ids of the nodes in `nodes`, a result of `ray.nodes()`, in an order that keeps neighbors together: by
    NVLink domain, then number in the cluster job, then address."""

    def position(node: Json) -> tuple[str, str, str]:
        labels = node.get("Labels") or {}
        return labels.get(DOMAIN, ""), labels.get(ORDER, ""), node["NodeManagerAddress"]

    return [node["NodeID"] for node in sorted(nodes, key=position)]
