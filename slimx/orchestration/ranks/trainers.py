"""All trainer ranks as one object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from slimx.algorithms.learner import learner_of
from slimx.cluster.place import Placement, place_of
from slimx.config.schema import Config
from slimx.data.batch import TrainBatch, TrainingRow
from slimx.data.routes import for_stage
from slimx.data.saved.trained_tokens import TrainedTokens
from slimx.engines.transport import transport_of
from slimx.errors import SlimxError
from slimx.layout.ranks import Sizes, coordinates, stage_layers
from slimx.layout.table import Table
from slimx.models.files.formats import format_of
from slimx.models.files.writer import finish_directory, shard_name
from slimx.numerics.mode import mode_of
from slimx.orchestration.ranks.group import RankGroup
from slimx.reshard.pack.packer import describe
from slimx.reshard.pack.pieces import PlannedBuckets
from slimx.reshard.packed import PUBLISHER, PackedBucket
from slimx.reshard.plan.copy_plan import Plan
from slimx.runtime.tasks import in_thread
from slimx.trainer.worker import TrainerWorker


class TrainerGroup(RankGroup):
    """`trainer.world_size` ranks that hold one policy."""

    def __init__(
        self,
        config: Config,
        sizes: Sizes,
        device: str,
        log_dir: Path,
        table: Table,
        plans: Mapping[str, Plan],
        worker: type = TrainerWorker,
        *,
        name: str = "trainer",
    ):
        """`table`: of the model. `plans`: by which weights leave, "export" and what engines are published to by."""
        critic = config.critic is not None and config.critic.placement == "shared"
        super().__init__(name, config, sizes, log_dir, device, ["model", "critic"] if critic else ["model"], worker)
        self.table = table
        self.plans = {name: PlannedBuckets(plan) for name, plan in plans.items()}
        self.holders = 1
        """Ranks whose memory buckets are published from: the publisher, or all."""
        self.folds = 1
        """Shards of a batch that each data-parallel rank trains: more than one where there were more ranks."""

    def fewer(self, sizes: Sizes, plans: Mapping[str, Plan]) -> Self:
        """A group of new ranks of the smaller `sizes` that trains the same batches, to be started; the ranks of this
        one have ended. `plans`: by which weights leave them."""
        other = copy(self)
        trainer = self.config.trainer.model_copy(update={"world_size": sizes.world, "data": sizes.data})
        other.config, other.sizes = self.config.model_copy(update={"trainer": trainer}), sizes
        other.folds, other.logs = self.folds * self.sizes.data // sizes.data, self.logs[: sizes.world]
        other.plans = {name: PlannedBuckets(plan) for name, plan in plans.items()}
        other.actors, other.started = other._launch(), []
        return other

    def adopt(self, successor: RankGroup) -> None:
        super().adopt(successor)
        assert isinstance(successor, TrainerGroup)
        self.config, self.sizes, self.logs = successor.config, successor.sizes, successor.logs
        self.folds, self.plans, self.holders = successor.folds, successor.plans, successor.holders

    def folded(self, shards: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """The micro-batches of a batch's shards by the data-parallel rank that trains them."""
        folds = self.folds
        return [list(chain.from_iterable(shards[at : at + folds])) for at in range(0, len(shards), folds)]

    def by_shard(self, results: Sequence[Any]) -> list[Any]:
        of_ranks = super().by_shard(results)
        if self.folds == 1:
            return of_ranks
        several = [(each, len(each) // self.folds) for each in of_ranks]
        return [each[at : at + count] for each, count in several for at in range(0, len(each), count)]

    async def start(self) -> list[dict[str, Any]]:
        """Bring all ranks up, with the plans by which weights leave; their pids and adapters, by rank."""
        started = await super().start()
        wanted = mode_of(self.config).contract(self.config.numerics.dtype)
        for rank, one in enumerate(started):
            if one["numerics"] != wanted:  # another release of slimx on its machine
                raise SlimxError(
                    f"{self.holder(rank)} computes by the contract {one['numerics']}, this process by {wanted}; "
                    "install the same slimx on every machine",
                )
        await self._prepare()
        return started

    async def places(self) -> list[Placement]:
        """By rank its machine and its GPU: engines that take turns with trainers run there."""
        asked = [actor.__ray_call__.remote(place_of) for actor in self.actors]
        return await self.answers(asked, range(self.sizes.world), "the look for the trainers' machines")

    async def train_step(self, updates: list[TrainBatch], *, step: int, version: int) -> dict[str, float]:
        """One optimizer step per update, one after the other; the metrics of them all."""
        shards = [list(shards) for shards in zip(*(self.folded(update.shards) for update in updates), strict=True)]
        what, each = f"step {step} of training", await self.sharded(shards)
        return self.metrics_of(await self.call("model.train_updates", what, each=each, step=step, version=version))

    async def trained_tokens(
        self, updates: Sequence[TrainBatch], rows: Sequence[Sequence[TrainingRow]]
    ) -> list[TrainedTokens]:
        """Values that the last step, of `updates`, computed of every token of its `rows`, in their order."""
        results = await self.call("model.trained_tokens", "the log-probs of the trained tokens")
        out = []
        for number, (update, own) in enumerate(zip(updates, rows, strict=True)):
            # Ranks of earlier stages have none.
            shards = self.by_shard([told[number] if told else [] for told in results])
            logprobs, differs = (
                update.unpack([[batch[name] for batch in shard] for shard in shards], own)
                for name in ("logprobs", "other_experts")
            )
            out += [
                TrainedTokens.of_row(row, values, marks)
                for row, values, marks in zip(own, logprobs, differs, strict=True)
            ]
        return out

    async def logprobs(self, batch: TrainBatch, *, under: Literal["policy", "reference"]) -> list[list[np.ndarray]]:
        """Log-prob of every label under the present weights or those of the reference, per data-parallel rank and
        micro-batch."""
        each = await self.sharded(self.folded(batch.shards))
        return self.by_shard(
            await self.call("model.logprobs", f"the log-probs under the {under}", each=each, under=under)
        )

    async def refresh_reference(self, path: Path | None = None) -> None:
        """Make the weights in the Hugging Face directory `path`, or the present ones, the reference."""
        where = None if path is None else str(path)
        await self.call("model.refresh_reference", "the refresh of the reference", path=where)

    async def measure_gap(self, batch: TrainBatch, *, version: int, mismatch: bool = False) -> dict[str, float]:
        """The log-prob gap of `batch` under the present weights, and with `mismatch` that of all its tokens; nothing is
        trained."""
        what, each = "the measurement of the log-prob gap", await self.sharded(self.folded(batch.shards))
        return self.metrics_of(
            await self.call("model.measure_gap", what, each=each, version=version, mismatch=mismatch)
        )

    async def check_files(self, path: Path, shares: list[bytes]) -> None:
        """Have every rank compare its share of the files in `path` with their records."""
        each = [(share,) for share in shares]
        await self.call("model.check_files", f"reading the files of {path}", each=each, path=str(path))

    async def export(self, directory: Path) -> None:
        """Write the present weights into `directory`, an empty one, as Hugging Face files."""
        buckets, shards = self.plans["export"], []
        learner = learner_of(self.config.algorithm)
        count = buckets.plan.count + (learner is not None)
        for bucket in range(buckets.plan.count):
            path = str(directory / shard_name(bucket, count))
            packed = await self.pack("export", bucket)
            what = f"the writing of {path}"
            shards += await self.call("weights.write_bucket", what, ranks=[PUBLISHER], packed=packed, path=path)
            await self.release("export", bucket)
        if learner is not None:
            shards.append(await learner.write_head(self, directory / shard_name(count - 1, count)))
        # Frozen tensors may be gigabytes: the loop's other work goes on meanwhile.
        await in_thread(
            finish_directory,
            directory,
            Path(self.config.model.path),
            self.table,
            shards,
            # What gives scores has nothing of a policy's but its trunk.
            weights=self._carried_from() if learner is None else None,
        )
        if learner is not None:
            await in_thread(learner.declare, directory)

    async def offload(self, *, weights: bool = True) -> None:
        """Give the devices' memory back to the engines; without `weights` those stay, to be published from."""
        await self.call("rank.offload", "the offload of the trainers", weights=weights)

    async def reload(self) -> None:
        """Take back all that `offload` gave."""
        await self.call("rank.reload", "the reload of the trainers")

    async def memory(self) -> dict[str, float]:
        """`memory/PHASE_peak_mib` since the last call: the highest of all ranks, in MiB."""
        peaks = await self.call("rank.memory", "the trainers' peak memory")
        names = {name for rank in peaks for name in rank}
        return {name: max(rank.get(name, 0.0) for rank in peaks) for name in sorted(names)}

    async def pack(self, name: str, bucket: int) -> PackedBucket:
        """All ranks write what they have of a bucket of plan `name` into the memory of those that hold it, together."""
        what, holders = f"the packing of bucket {bucket} ({name})", self._holders_of(name)
        places = await self.call("weights.open", what, ranks=holders, name=name, bucket=bucket)
        opened = dict(chain.from_iterable(of_rank.items() for of_rank in places))
        paths = [opened[part] for part in sorted(opened)]
        shares = await self.call("weights.fill", what, name=name, bucket=bucket, paths=paths)
        return describe(self.plans[name].form(bucket), paths, shares)

    async def release(self, name: str, bucket: int | None) -> None:
        """Let the memory of a bucket of plan `name` be used again; None: a publication has ended, on all ranks."""
        ranks = None if bucket is None else self._holders_of(name)
        await self.call("weights.release", f"the release of buckets ({name})", ranks=ranks, name=name, bucket=bucket)

    def _holders_of(self, name: str) -> range:
        """The ranks whose memory the buckets of plan `name` are in."""
        return range(1 if name == "export" else self.holders)

    async def _prepare(self) -> None:
        """Bring the plans to all ranks, and find out whose memory buckets can be in."""
        for name, buckets in self.plans.items():
            publish = None if name == "export" else self.config.publish
            if publish is not None and not transport_of(publish).gathers:
                continue
            on_device = publish is not None and publish.on_device
            remote = [rank for rank, here in enumerate(await self._reach(PUBLISHER, on_device)) if not here]
            holders = 1
            if publish is not None and publish.one_machine and not remote:
                others = [await self._reach(rank, on_device) for rank in range(1, self.sizes.world)]
                holders = self.sizes.world if all(map(all, others)) else 1
                buckets = self.plans[name] = PlannedBuckets(buckets.plan, apart=holders > 1)
            if publish is not None:
                self.holders = holders
            (stored,) = await self.stored([buckets.plan.to_bytes()])
            arguments = {"name": name, "plan": stored, "remote": remote, "on_device": on_device, "holders": holders}
            await self.call("weights.prepare", f"the plan of the {name}", **arguments)

    async def _reach(self, rank: int, on_device: bool) -> list[bool]:
        """By rank whether it can write into the memory of `rank`."""
        what = f"the look for the memory of rank {rank}"
        ((path, content),) = await self.call("weights.probe", what, ranks=[rank], on_device=on_device)
        return await self.call("weights.reaches", what, path=path, content=content)

    async def sharded(self, shards: Sequence[Any]) -> list[tuple[Any]]:
        """Argument of each rank: its data-parallel shard with the routes of its own pipeline stage, stored once for the
        ranks that share both."""
        sizes = self.sizes
        if sizes.pipeline == 1 or not (self.config.rollout.sampled and self.config.rollout.routed_experts):
            return await super().sharded(shards)
        stages = stage_layers(sizes, self.table.layers)
        stored = await self.stored([for_stage(shard, layers) for shard in shards for layers in stages])
        places = [coordinates(rank, sizes) for rank in range(sizes.world)]
        return [(stored[place.data * len(stages) + place.pipeline],) for place in places]

    def _carried_from(self) -> Path | None:
        """The directory of tensors that trainers do not hold: a directory of another form has none of them."""
        weights = Path(self.config.initial_weights)
        if format_of(weights) is None:
            return weights
        own = Path(self.config.model.path)
        return own if any(own.glob("*.safetensors")) else None
