"""All trainer ranks as one object; also the source of weights that the publisher reads."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from slimx.config.schema import Config
from slimx.data.batch import TrainBatch
from slimx.layout.ranks import Sizes, coordinates
from slimx.layout.table import Table
from slimx.models.checkpoint_writer import finish_directory, shard_name
from slimx.orchestration.waiting import gather
from slimx.reshard.gather import PUBLISHER
from slimx.reshard.packed import PackedBucket
from slimx.reshard.packer import describe
from slimx.reshard.pieces import PlannedBuckets
from slimx.reshard.plan import Plan
from slimx.trainer.worker import TrainerWorker


class TrainerGroup:
    """`trainer.world_size` Ray actors, called together, each call with a deadline."""

    def __init__(
        self,
        config: Config,
        sizes: Sizes,
        device: str,
        log_dir: Path,
        table: Table,
        plans: Mapping[str, Plan],
        worker: type = TrainerWorker,
    ):
        """`table`: of the model. `plans`: by which weights leave, "export" and, with engines, "publish"."""
        self.config, self.sizes, self.table = config, sizes, table
        self.plans = {name: PlannedBuckets(plan) for name, plan in plans.items()}
        self.logs = [log_dir / f"trainer-{rank}.log" for rank in range(sizes.world)]
        share = 0.5 if config.schedule.colocate else 1
        actor = ray.remote(worker).options(num_cpus=config.trainer.threads, num_gpus=share if device == "cuda" else 0)
        values = config.model_dump(mode="json")
        self.actors = [actor.remote(rank, values, str(self.logs[rank]), device) for rank in range(sizes.world)]

    async def start(self) -> list[dict[str, Any]]:
        """Bring all ranks up; their pids and adapters, by rank."""
        limit = self.config.cluster.start_deadline
        (where,) = await gather(
            [self.actors[0].rendezvous.remote()],
            what="the start of trainer rank 0",
            holders=["trainer rank 0"],
            deadline_s=limit,
            logs=self.logs[:1],
        )
        started = await self._all("start", [(where,)] * self.sizes.world, "the start of the trainers", limit)
        await self._prepare()
        return started

    async def train_step(self, updates: list[TrainBatch], *, step: int, version: int) -> dict[str, float]:
        """One optimizer step per update, one after the other; the metrics of them all."""
        shards = [list(shards) for shards in zip(*(update.shards for update in updates), strict=True)]
        results = await self._all("train_step", self._arguments(shards, step, version), f"step {step} of training")
        return results[self._reporter()]

    async def measure_gap(self, batch: TrainBatch, *, version: int) -> dict[str, float]:
        """The log-prob gap of `batch` under the present weights; nothing is trained."""
        results = await self._all(
            "measure_gap", self._arguments(batch.shards, version), "the measurement of the log-prob gap"
        )
        return results[self._reporter()]

    async def save(self, path: Path, *, step: int) -> None:
        """Have all ranks copy their state and start writing it; their reports in `path` tell the rest."""
        await self._all("save", [(str(path), step)] * self.sizes.world, f"the copy of the state for {path}")

    async def restore(self, path: Path, *, same_layout: bool, load_optimizer: bool) -> None:
        arguments = [(str(path), same_layout, load_optimizer)] * self.sizes.world
        await self._all("restore", arguments, f"loading the checkpoint {path}")

    async def check_files(self, path: Path, shares: list[bytes]) -> None:
        """Have every rank compare its share of the files in `path` with their records."""
        await self._all("check_files", [(str(path), share) for share in shares], f"reading the files of {path}")

    async def export(self, directory: Path) -> None:
        """Write the present weights into `directory`, an empty one, as Hugging Face files."""
        buckets, shards = self.plans["export"], []
        for bucket in range(buckets.plan.count):
            path = str(directory / shard_name(bucket, buckets.plan.count))
            packed = await self._pack("export", bucket)
            shards.append(await self._publisher("write_bucket", packed, path))
            await self._publisher("release_buckets", "export", bucket)
        # Frozen tensors may be gigabytes: the loop's other work goes on meanwhile.
        await asyncio.to_thread(
            finish_directory,
            directory,
            Path(self.config.model.path),
            self.table,
            shards,
            weights=Path(self.config.initial_weights),
        )

    async def offload(self) -> None:
        await self._all("offload", [()] * self.sizes.world, "the offload of the trainers")

    async def reload(self) -> None:
        await self._all("reload", [()] * self.sizes.world, "the reload of the trainers")

    # Source of weights (slimx.reshard.parties) ------------------------------------------------------------------------

    async def forms(self) -> list[dict[str, str]]:
        return self.plans["publish"].forms()

    async def bucket_count(self) -> int:
        return self.plans["publish"].plan.count

    async def gather(self, bucket: int) -> PackedBucket:
        return await self._pack("publish", bucket)

    async def release(self, bucket: int | None = None) -> None:
        if bucket is None:
            arguments = [("publish", None)] * self.sizes.world
            await self._all("release_buckets", arguments, "the end of the publication")
        else:
            await self._publisher("release_buckets", "publish", bucket)

    async def _pack(self, name: str, bucket: int) -> PackedBucket:
        """All ranks write their parts of a bucket of plan `name` into the publisher's memory, together."""
        path = await self._publisher("open_bucket", name, bucket)
        arguments = [(name, bucket, path)] * self.sizes.world
        shares = await self._all("fill_bucket", arguments, f"the packing of bucket {bucket} ({name})")
        return describe(self.plans[name].form(bucket), path, shares)

    async def _prepare(self) -> None:
        """Bring the plans to all ranks, and find those that cannot reach the publisher's memory."""
        for name, buckets in self.plans.items():
            on_device = name == "publish" and self.config.publish.on_device
            path = await self._publisher("probe", on_device)
            reached = await self._all("reaches", [(path,)] * self.sizes.world, "the look for the publisher's memory")
            remote = [rank for rank, here in enumerate(reached) if not here]
            stored = ray.put(buckets.plan.to_bytes())
            given = (name, stored, remote, on_device)
            await self._all("prepare", [given] * self.sizes.world, f"the plan of the {name}")

    async def _publisher(self, method: str, *arguments: Any) -> Any:
        (out,) = await gather(
            [getattr(self.actors[PUBLISHER], method).remote(*arguments)],
            what=method.replace("_", " "),
            holders=[f"trainer rank {PUBLISHER}"],
            deadline_s=self.config.trainer.deadline,
            logs=self.logs[PUBLISHER : PUBLISHER + 1],
        )
        return out

    async def stop(self, grace_s: float = 5.0) -> None:
        """End all ranks; does not raise."""
        for actor in self.actors:
            ray.kill(actor)

    def _arguments(self, shards: Sequence[Any], *rest: int) -> list[tuple[Any, ...]]:
        """Per rank the arguments of a call: its data-parallel shard, stored once for the ranks that share it."""
        stored: list[ray.ObjectRef] = [ray.put(shard) for shard in shards]
        return [(stored[coordinates(rank, self.sizes).data], *rest) for rank in range(self.sizes.world)]

    def _reporter(self) -> int:
        """The rank whose metrics are the whole batch's: the first of the last pipeline stage."""
        return self.sizes.stage * (self.sizes.pipeline - 1)

    async def _all(
        self, method: str, arguments: list[tuple[Any, ...]], what: str, deadline_s: float | None = None
    ) -> list[Any]:
        references = [
            getattr(actor, method).remote(*given) for actor, given in zip(self.actors, arguments, strict=True)
        ]
        return await gather(
            references,
            what=what,
            holders=[f"trainer rank {rank}" for rank in range(self.sizes.world)],
            deadline_s=deadline_s or self.config.trainer.deadline,
            logs=self.logs,
        )
