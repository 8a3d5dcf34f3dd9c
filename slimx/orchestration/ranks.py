"""The ranks of one torch.distributed world as one object."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from slimx.config.schema import Config
from slimx.layout.ranks import Sizes, coordinates
from slimx.orchestration.placement import PackedGpus
from slimx.orchestration.waiting import gather


class RankGroup:
    """Ray actors that are called together, each call with a deadline."""

    def __init__(self, name: str, config: Config, sizes: Sizes, log_dir: Path, device: str, *, worker: type):
        """`name`: of the group, in messages and logs. `config`: its `trainer` section is the group's own."""
        self.name, self.config, self.sizes = name, config, sizes
        self.logs = [log_dir / f"{name}-{rank}.log" for rank in range(sizes.world)]
        actor, threads = ray.remote(worker), config.trainer.threads
        self._gpus = (
            PackedGpus(name, sizes.world, cpus=threads, deadline_s=config.cluster.start_deadline)
            if device == "cuda"
            else None
        )
        values = config.model_dump(mode="json")
        self.actors = [
            actor.options(num_cpus=threads, **(self._gpus.options(rank) if self._gpus else {"num_gpus": 0})).remote(
                rank, values, str(self.logs[rank]), device
            )
            for rank in range(sizes.world)
        ]

    async def start(self) -> list[dict[str, Any]]:
        """Bring all ranks up; their pids and adapters, by rank."""
        limit = self.config.cluster.start_deadline
        (where,) = await gather(
            [self.actors[0].rendezvous.remote()],
            what=f"the start of {self.name} rank 0",
            holders=[f"{self.name} rank 0"],
            deadline_s=limit,
            logs=self.logs[:1],
        )
        return await self.call("start", self.same(where), f"the start of the {self.name} ranks", limit)

    async def stop(self, grace_s: float = 5.0) -> None:
        """End all ranks; does not raise."""
        for actor in self.actors:
            ray.kill(actor)
        if self._gpus is not None:
            self._gpus.release()

    async def call(
        self, method: str, arguments: Sequence[tuple[Any, ...]], what: str, deadline_s: float | None = None
    ) -> list[Any]:
        """Call `method` on all ranks, with each rank's own arguments; results by rank."""
        references = [
            getattr(actor, method).remote(*given) for actor, given in zip(self.actors, arguments, strict=True)
        ]
        return await gather(
            references,
            what=what,
            holders=[f"{self.name} rank {rank}" for rank in range(self.sizes.world)],
            deadline_s=deadline_s or self.config.trainer.deadline,
            logs=self.logs,
        )

    def same(self, *arguments: Any) -> list[tuple[Any, ...]]:
        """The same arguments for every rank."""
        return [arguments] * self.sizes.world

    def sharded(self, shards: Sequence[Any], *rest: Any) -> list[tuple[Any, ...]]:
        """Per rank its data-parallel shard, stored once for the ranks that share it, and the rest."""
        stored: list[ray.ObjectRef] = [ray.put(shard) for shard in shards]
        return [(stored[coordinates(rank, self.sizes).data], *rest) for rank in range(self.sizes.world)]

    def metrics_of(self, results: Sequence[Any]) -> Any:
        """The whole batch's metrics out of all ranks': those of the last pipeline stage's first rank."""
        return results[self.sizes.stage * (self.sizes.pipeline - 1)]

    def by_shard(self, results: Sequence[Any]) -> list[Any]:
        """Of per-token results those of each data-parallel shard, from a rank of the last stage that has them whole."""
        last = self.sizes.stage * (self.sizes.pipeline - 1)
        return [results[last + data * self.sizes.tensor * self.sizes.context] for data in range(self.sizes.data)]
