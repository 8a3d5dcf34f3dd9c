"""All trainer ranks as one object; also the source of weights that the publisher reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray

from slimx.config.schema import Config
from slimx.data.batch import TrainBatch
from slimx.layout.ranks import Sizes, coordinates
from slimx.models.checkpoint_writer import finish_directory, shard_name
from slimx.orchestration.waiting import gather
from slimx.reshard.gather import PUBLISHER
from slimx.reshard.packed import PackedBucket
from slimx.trainer.worker import TrainerWorker


class TrainerGroup:
    """`trainer.world_size` Ray actors, called together, each call with a deadline."""

    def __init__(self, config: Config, sizes: Sizes, device: str, log_dir: Path, worker: type = TrainerWorker):
        self.config, self.sizes = config, sizes
        self.logs = [log_dir / f"trainer-{rank}.log" for rank in range(sizes.world)]
        self._buckets: list[dict[str, str]] = []
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
        self._buckets = started[0]["buckets"]
        return started

    async def train_step(self, batch: TrainBatch, *, step: int, version: int) -> dict[str, float]:
        """One optimizer step; the metrics of the whole batch."""
        results = await self._all("train_step", self._shards(batch, step, version), f"step {step} of training")
        return results[self._reporter()]

    async def measure_gap(self, batch: TrainBatch, *, version: int) -> dict[str, float]:
        """The log-prob gap of `batch` under the present weights; nothing is trained."""
        results = await self._all("measure_gap", self._shards(batch, version), "the measurement of the log-prob gap")
        return results[self._reporter()]

    async def save(self, path: Path) -> None:
        await self._all("save", [(str(path),)] * self.sizes.world, f"the checkpoint {path}")

    async def restore(self, path: Path, *, same_layout: bool) -> None:
        await self._all("restore", [(str(path), same_layout)] * self.sizes.world, f"loading the checkpoint {path}")

    async def export(self, directory: Path) -> None:
        """Write the present weights into `directory`, an empty one, as Hugging Face files."""
        shards = []
        for bucket in range(len(self._buckets)):
            path = str(directory / shard_name("model", bucket, len(self._buckets)))
            results = await self._all(
                "export_bucket", [(bucket, path)] * self.sizes.world, f"the export to {directory}"
            )
            shards.append(results[PUBLISHER])
        finish_directory(directory, Path(self.config.model.path), shards, "model")

    async def offload(self) -> None:
        await self._all("offload", [()] * self.sizes.world, "the offload of the trainers")

    async def reload(self) -> None:
        await self._all("reload", [()] * self.sizes.world, "the reload of the trainers")

    # Source of weights (slimx.reshard.publish) ------------------------------------------------------------------------

    async def tensors(self) -> dict[str, str]:
        return {name: form for bucket in self._buckets for name, form in bucket.items()}

    async def bucket_count(self) -> int:
        return len(self._buckets)

    async def gather(self, bucket: int) -> PackedBucket:
        results = await self._all("gather", [(bucket,)] * self.sizes.world, f"the gather of bucket {bucket}")
        return results[PUBLISHER]

    async def release(self) -> None:
        await self._all("release", [()] * self.sizes.world, "the release of the buckets")

    async def stop(self, grace_s: float = 5.0) -> None:
        """End all ranks; does not raise."""
        for actor in self.actors:
            ray.kill(actor)

    def _shards(self, batch: TrainBatch, *rest: int) -> list[tuple[Any, ...]]:
        """Per rank the arguments of a call: its data-parallel shard, stored once for the ranks that share it."""
        stored: list[ray.ObjectRef] = [ray.put(shard) for shard in batch.shards]
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
