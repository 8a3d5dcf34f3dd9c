"""All trainer ranks as one object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from itertools import chain
from pathlib import Path
from typing import Literal, Self

import numpy as np
import ray

from slimx.algorithms.learner import learner_of
from slimx.cluster.place import Placement, place_of
from slimx.config.schema import Config
from slimx.data.batch import TrainBatch, TrainingRow
from slimx.data.routes import for_stage
from slimx.data.saved.trained_tokens import TrainedTokens
from slimx.engines.transport import transport_of
from slimx.errors import SlimxError
from slimx.json_types import Json
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
    """The `trainer.world_size` ranks of one policy."""

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
        """Creates the actors. `table`: the model's weight table. `plans`: plans of exports ("export") and of
        publications, by name."""
        critic = config.critic is not None and config.critic.placement == "shared"
        roles = ["model", "critic"] if critic else ["model"]
        super().__init__(name, config, sizes, log_dir, device, roles, worker)
        self.table = table
        self.plans: Mapping[str, PlannedBuckets] = {name: PlannedBuckets(plan) for name, plan in plans.items()}
        self.holders = 1
        """Number of ranks in whose memory published buckets are: 1 (the publisher) or all."""
        self.folds = 1
        """Batch shards that each data-parallel rank trains: more than one after the number of ranks has shrunk."""

    def fewer(self, sizes: Sizes, plans: Mapping[str, Plan]) -> Self:
        """Returns a group with new ranks, not started yet, of the smaller `sizes`; it trains the same batches. The
        ranks of this group must have ended. `plans`: plans of the new group's exports and publications, by name."""
        other = copy(self)
        trainer = self.config.trainer.model_copy(update={"world_size": sizes.world, "data": sizes.data})
        other.config = self.config.model_copy(update={"trainer": trainer})
        other.sizes = sizes
        other.folds = self.folds * self.sizes.data // sizes.data
        other.logs = self.logs[: sizes.world]
        other.plans = {name: PlannedBuckets(plan) for name, plan in plans.items()}
        other.actors = other._launch()
        other.started = []
        return other

    def adopt(self, successor: RankGroup) -> None:
        super().adopt(successor)
        assert isinstance(successor, TrainerGroup)
        self.config = successor.config
        self.sizes = successor.sizes
        self.logs = successor.logs
        self.folds = successor.folds
        self.plans = successor.plans
        self.holders = successor.holders

    def folded[T](self, shards: Sequence[Sequence[T]]) -> list[list[T]]:
        """Returns the micro-batches of a batch's shards by the data-parallel rank that trains them."""
        folds = self.folds
        by_rank = []
        for first in range(0, len(shards), folds):
            by_rank.append(list(chain.from_iterable(shards[first : first + folds])))
        return by_rank

    def by_shard[T](self, results: Sequence[Sequence[T]]) -> list[Sequence[T]]:
        by_rank = super().by_shard(results)
        if self.folds == 1:
            return by_rank
        shards: list[Sequence[T]] = []
        for values in by_rank:
            count = len(values) // self.folds
            shards += [values[i : i + count] for i in range(0, len(values), count)]
        return shards

    async def start(self) -> list[Json]:
        """Starts all ranks with the plans of exports and publications; returns pids and adapters by rank."""
        started = await super().start()
        contract = mode_of(self.config).contract(self.config.numerics.dtype)
        for rank, result in enumerate(started):
            if result["numerics"] != contract:  # another release of slimx on its machine
                raise SlimxError(
                    f"{self.holder(rank)} computes by the contract {result['numerics']}, this process by {contract}; "
                    "install the same slimx on every machine",
                )
        await self._prepare()
        return started

    async def places(self) -> list[Placement]:
        """Returns machine and GPU by rank, where colocated engines run."""
        references = [actor.__ray_call__.remote(place_of) for actor in self.actors]
        return await self.answers(references, range(self.sizes.world), "the look for the trainers' machines")

    async def train_step(self, updates: list[TrainBatch], *, step: int, version: int) -> dict[str, float]:
        """Runs one optimizer step per update, in order; returns the metrics of all."""
        by_update = []
        for update in updates:
            by_update.append(self.folded(update.shards))
        shards = [list(shards) for shards in zip(*by_update, strict=True)]
        per_rank = await self.sharded(shards)
        what = f"step {step} of training"
        results = await self.call("model.train_updates", what, per_rank=per_rank, step=step, version=version)
        return self.metrics_of(results)

    async def trained_tokens(
        self, updates: Sequence[TrainBatch], rows: Sequence[Sequence[TrainingRow]]
    ) -> list[TrainedTokens]:
        """Returns the last step's values for every token, row by row. `updates` and `rows`: those of that step."""
        results = await self.call("model.trained_tokens", "the log-probs of the trained tokens")
        tokens: list[TrainedTokens] = []
        for index, (update, update_rows) in enumerate(zip(updates, rows, strict=True)):
            # Ranks of earlier stages have none.
            shards = self.by_shard([result[index] if result else [] for result in results])
            logprobs = update.unpack(_values_of("logprobs", shards), update_rows)
            differs = update.unpack(_values_of("other_experts", shards), update_rows)
            for row, values, marks in zip(update_rows, logprobs, differs, strict=True):
                tokens.append(TrainedTokens.of_row(row, values, marks))
        return tokens

    async def logprobs(self, batch: TrainBatch, *, under: Literal["policy", "reference"]) -> list[list[np.ndarray]]:
        """Returns the log-prob of every label under the current weights or those of the reference, per data-parallel
        rank and micro-batch."""
        per_rank = await self.sharded(self.folded(batch.shards))
        results = await self.call("model.logprobs", f"the log-probs under the {under}", per_rank=per_rank, under=under)
        return [list(shard) for shard in self.by_shard(results)]

    async def refresh_reference(self, path: Path | None = None) -> None:
        """Makes the weights in the Hugging Face directory `path`, or the current ones, the reference."""
        directory = None if path is None else str(path)
        await self.call("model.refresh_reference", "the refresh of the reference", path=directory)

    async def measure_gap(self, batch: TrainBatch, *, version: int, mismatch: bool = False) -> dict[str, float]:
        """Returns the log-prob gap of `batch` under the current weights, with `mismatch` that of all its tokens,
        without training."""
        per_rank = await self.sharded(self.folded(batch.shards))
        what = "the measurement of the log-prob gap"
        results = await self.call("model.measure_gap", what, per_rank=per_rank, version=version, mismatch=mismatch)
        return self.metrics_of(results)

    async def check_files(self, path: Path, records: Sequence[bytes]) -> None:
        """Makes every rank compare its part of the files in `path` with their `records`."""
        per_rank = [(part,) for part in records]
        await self.call("model.check_files", f"reading the files of {path}", per_rank=per_rank, path=str(path))

    async def export(self, directory: Path) -> None:
        """Writes the current weights into `directory`, an empty one, as Hugging Face files."""
        buckets = self.plans["export"]
        shards = []
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
        # Frozen tensors may be gigabytes: a thread keeps the event loop free.
        await in_thread(
            finish_directory,
            directory,
            Path(self.config.model.path),
            self.table,
            shards,
            # A model with a score head shares only the trunk with a policy.
            weights=self._carried_from() if learner is None else None,
        )
        if learner is not None:
            await in_thread(learner.declare, directory)

    async def offload(self, *, weights: bool = True) -> None:
        """Releases the devices' memory to the engines; `weights=False` keeps the weights, to publish from them."""
        await self.call("rank.offload", "the offload of the trainers", weights=weights)

    async def reload(self) -> None:
        """Loads back everything that `offload` released."""
        await self.call("rank.reload", "the reload of the trainers")

    async def memory(self) -> dict[str, float]:
        """Returns `memory/PHASE_peak_mib` since the last call: the maximum over all ranks, in MiB."""
        peaks = await self.call("rank.memory", "the trainers' peak memory")
        highest: dict[str, float] = {}
        for rank_peaks in peaks:
            for name, peak in rank_peaks.items():
                highest[name] = max(highest.get(name, 0.0), peak)
        return dict(sorted(highest.items()))

    async def pack(self, name: str, bucket: int) -> PackedBucket:
        """Makes all ranks write their parts of a bucket of plan `name` into the memory of the bucket's holders."""
        what = f"the packing of bucket {bucket} ({name})"
        opened: dict[int, str] = {}
        for paths_of_rank in await self.call(
            "weights.open", what, ranks=self._holders_of(name), name=name, bucket=bucket
        ):
            opened |= paths_of_rank
        paths = [opened[part] for part in sorted(opened)]
        written = await self.call("weights.fill", what, name=name, bucket=bucket, paths=paths)
        return describe(self.plans[name].form(bucket), paths, written)

    async def release(self, name: str, bucket: int | None) -> None:
        """Makes the memory of a bucket of plan `name` reusable; None: a publication has ended, on all ranks."""
        ranks = None if bucket is None else self._holders_of(name)
        await self.call("weights.release", f"the release of buckets ({name})", ranks=ranks, name=name, bucket=bucket)

    def _holders_of(self, name: str) -> range:
        """Returns the ranks in whose memory the buckets of plan `name` are."""
        return range(1 if name == "export" else self.holders)

    async def _prepare(self) -> None:
        """Sends the plans to all ranks, and determines in whose memory buckets can be."""
        for name, buckets in self.plans.items():
            publish = None if name == "export" else self.config.publish
            if publish is not None and not transport_of(publish).gathers:
                continue
            on_device = publish is not None and publish.on_device
            reaches_publisher = await self._reach(PUBLISHER, on_device)
            remote = [rank for rank, reaches in enumerate(reaches_publisher) if not reaches]
            holders = 1
            if publish is not None and publish.one_machine and not remote:
                others = []
                for rank in range(1, self.sizes.world):
                    others.append(await self._reach(rank, on_device))
                holders = self.sizes.world if all(map(all, others)) else 1
                self.plans = {**self.plans, name: PlannedBuckets(buckets.plan, apart=holders > 1)}
            if publish is not None:
                self.holders = holders
            (stored,) = await self.stored([buckets.plan.to_bytes()])
            await self.call(
                "weights.prepare",
                f"the plan of the {name}",
                name=name,
                plan=stored,
                remote=remote,
                on_device=on_device,
                holders=holders,
            )

    async def _reach(self, rank: int, on_device: bool) -> list[bool]:
        """Returns, by rank, if it can write into the memory of `rank`."""
        what = f"the look for the memory of rank {rank}"
        ((path, content),) = await self.call("weights.probe", what, ranks=[rank], on_device=on_device)
        return await self.call("weights.reaches", what, path=path, content=content)

    async def sharded(self, shards: Sequence[Sequence[object]]) -> list[tuple[ray.ObjectRef]]:
        """Returns the argument of each rank: its data-parallel shard with the routes of its pipeline stage, stored once
        for the ranks that share both."""
        sizes = self.sizes
        if sizes.pipeline == 1 or not (self.config.rollout.sampled and self.config.rollout.routed_experts):
            return await super().sharded(shards)
        stages = stage_layers(sizes, self.table.layers)
        pieces = []
        for shard in shards:
            pieces += [for_stage(shard, layers) for layers in stages]
        stored = await self.stored(pieces)
        arguments = []
        for rank in range(sizes.world):
            position = coordinates(rank, sizes)
            arguments.append((stored[position.data * len(stages) + position.pipeline],))
        return arguments

    def _carried_from(self) -> Path | None:
        """Returns the directory of tensors that trainers do not hold; None if no Hugging Face directory has them."""
        weights = Path(self.config.initial_weights)
        if format_of(weights) is None:
            return weights
        model = Path(self.config.model.path)
        return model if any(model.glob("*.safetensors")) else None


def _values_of(name: str, shards: Sequence[Sequence[Mapping[str, np.ndarray]]]) -> list[list[np.ndarray]]:
    """Returns one of the values computed for every micro-batch, by shard."""
    values = []
    for shard in shards:
        values.append([batch[name] for batch in shard])
    return values
