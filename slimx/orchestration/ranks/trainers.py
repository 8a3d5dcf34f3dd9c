"""All trainer ranks of one policy, which are called together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from itertools import chain
from pathlib import Path
from typing import Literal, Self

import numpy as np

from slimx.algorithms.learner import learner_of
from slimx.cluster.place import Placement, place_of
from slimx.config.schema import Config
from slimx.data.batch import TrainBatch, TrainingRow
from slimx.data.saved.trained_tokens import TrainedTokens
from slimx.engines.transport import transport_of
from slimx.errors import SlimxError
from slimx.json_types import Json
from slimx.layout.ranks import Sizes
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
    """The `trainer.world_size` trainer ranks of one policy."""

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
        """Creates the actors without starting the ranks. `table`: weight table of the model. `plans`: plans that define
        how weights leave the trainers, by use: "export", "publish" and "adapters"."""
        critic = config.critic is not None and config.critic.placement == "shared"
        roles = ["model", "critic"] if critic else ["model"]
        super().__init__(name, config, sizes, log_dir, device, roles, worker)
        self.table = table
        self.plans: Mapping[str, PlannedBuckets] = {name: PlannedBuckets(plan) for name, plan in plans.items()}
        self.holders = 1
        """Number of ranks whose memory stores the buckets of a publication: 1 (only the publisher) or all ranks."""
        self.shards_per_rank = 1
        """Number of batch shards per data-parallel rank: 1, or more after the number of ranks was reduced."""

    def fewer(self, sizes: Sizes, plans: Mapping[str, Plan]) -> Self:
        """Returns a group with new, unstarted ranks and the smaller parallel sizes `sizes`; the new group trains on the
        same batches. The ranks of this group must have ended. `plans`: export and publication plans for the new group,
        by name."""
        other = copy(self)
        trainer = self.config.trainer.model_copy(update={"world_size": sizes.world, "data": sizes.data})
        other.config = self.config.model_copy(update={"trainer": trainer})
        other.sizes = sizes
        other.shards_per_rank = self.shards_per_rank * self.sizes.data // sizes.data
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
        self.shards_per_rank = successor.shards_per_rank
        self.plans = successor.plans
        self.holders = successor.holders

    def folded[T](self, shards: Sequence[Sequence[T]]) -> list[list[T]]:
        """Merges the batch's shards into one list of micro-batches for each data-parallel rank."""
        return folded(shards, self.shards_per_rank)

    def by_shard[T](self, results: Sequence[Sequence[T]]) -> list[Sequence[T]]:
        return unfolded(super().by_shard(results), self.shards_per_rank)

    async def start(self) -> list[Json]:
        """Starts all ranks and sends them the export and publication plans; returns information about each rank, such
        as its process id and machine. Raises SlimxError if a rank's numerical contract (`NumericsMode.contract`)
        differs from that of this process."""
        started = await super().start()
        contract = mode_of(self.config).contract(self.config.numerics.dtype)
        for rank, result in enumerate(started):
            if result["numerics"] != contract:  # its machine has another release of slimx
                raise SlimxError(
                    f"{self.holder(rank)} uses numerical contract {result['numerics']}, but this process uses "
                    f"{contract}; install the same release of slimx on every machine"
                )
        await self._prepare()
        return started

    async def places(self) -> list[Placement]:
        """Returns the machine and GPU of each rank, so that colocated engines can be placed there."""
        references = [actor.__ray_call__.remote(place_of) for actor in self.actors]
        return await self.answers(references, range(self.sizes.world), "the lookup of the trainers' machines")

    async def train_step(self, updates: list[TrainBatch], *, step: int, version: int) -> dict[str, float]:
        """Trains the policy on `updates` with one optimizer step each, and returns the metrics of the whole step.
        `version`: version of the engines' weights."""
        by_update = []
        for update in updates:
            by_update.append(self.folded(update.shards))
        shards = [list(shards) for shards in zip(*by_update, strict=True)]
        per_rank = await self.sharded(shards)
        what = f"training step {step}"
        results = await self.call("model.train_updates", what, per_rank=per_rank, step=step, version=version)
        return self.metrics_of(results)

    async def trained_tokens(
        self, updates: Sequence[TrainBatch], rows: Sequence[Sequence[TrainingRow]]
    ) -> list[TrainedTokens]:
        """Returns the values that the last training step computed for every token, such as log-probs, row by row.
        `updates` and `rows`: batches and training rows of that step."""
        results = await self.call("model.trained_tokens", "the log-probs of the trained tokens")
        tokens: list[TrainedTokens] = []
        for index, (update, update_rows) in enumerate(zip(updates, rows, strict=True)):
            # Ranks of earlier pipeline stages have no values.
            shards = self.by_shard([result[index] if result else [] for result in results])
            logprobs = update.unpack(_values_of("logprobs", shards), update_rows)
            differs = update.unpack(_values_of("other_experts", shards), update_rows)
            for row, values, marks in zip(update_rows, logprobs, differs, strict=True):
                tokens.append(TrainedTokens.of_row(row, values, marks))
        return tokens

    async def logprobs(self, batch: TrainBatch, *, under: Literal["policy", "reference"]) -> list[list[np.ndarray]]:
        """Returns the log-prob of every label in `batch` with the current weights ("policy") or the reference's
        ("reference"), by data-parallel shard and micro-batch."""
        per_rank = await self.sharded(self.folded(batch.shards))
        results = await self.call("model.logprobs", f"the log-probs of the {under}", per_rank=per_rank, under=under)
        return [list(shard) for shard in self.by_shard(results)]

    async def refresh_reference(self, path: Path | None = None) -> None:
        """Replaces the reference with the weights in the Hugging Face directory `path`; by default, with the current
        weights."""
        directory = None if path is None else str(path)
        await self.call("model.refresh_reference", "the replacement of the reference", path=directory)

    async def measure_gap(self, batch: TrainBatch, *, version: int, mismatch: bool = False) -> dict[str, float]:
        """Computes the log-probs of `batch` with the current weights, without training. Returns metrics of the gap to
        the engines' log-probs, over the tokens that `version` sampled. With `mismatch`, also compares the log-probs of
        all trained tokens, regardless of the version that sampled them."""
        per_rank = await self.sharded(self.folded(batch.shards))
        what = "the measurement of the log-prob gap"
        results = await self.call("model.measure_gap", what, per_rank=per_rank, version=version, mismatch=mismatch)
        return self.metrics_of(results)

    async def check_files(self, path: Path, records: Sequence[bytes]) -> None:
        """Makes every rank verify some of the files of the checkpoint in `path` by their digests. `records`: for each
        rank, encoded sizes and digests of the files that it must verify."""
        per_rank = [(part,) for part in records]
        await self.call(
            "model.check_files", f"the verification of the files in {path}", per_rank=per_rank, path=str(path)
        )

    async def export(self, directory: Path) -> None:
        """Writes the current weights as Hugging Face files into the empty directory `directory`."""
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
        # In a thread, because copying frozen tensors, which may have gigabytes, would block the event loop.
        await in_thread(
            finish_directory,
            directory,
            Path(self.config.model.path),
            self.table,
            shards,
            # A model with a score head has only the trunk of a policy, so no other tensors are copied.
            weights=self._carried_from() if learner is None else None,
        )
        if learner is not None:
            await in_thread(learner.declare, directory)

    async def offload(self, *, weights: bool = True) -> None:
        """Releases the trainers' device memory for colocated engines. `weights=False` keeps the weights on the devices,
        for a publication that follows."""
        await self.call("rank.offload", "the offloading of the trainers", weights=weights)

    async def reload(self) -> None:
        """Loads back onto the devices everything that `offload` has released."""
        await self.call("rank.reload", "the reloading of the trainers")

    async def memory(self) -> dict[str, float]:
        """Returns the peak memory of each phase since the last call as `memory/PHASE_peak_mib`: the maximum over all
        ranks, in MiB."""
        peaks = await self.call("rank.memory", "the trainers' peak memory")
        highest: dict[str, float] = {}
        for rank_peaks in peaks:
            for name, peak in rank_peaks.items():
                highest[name] = max(highest.get(name, 0.0), peak)
        return dict(sorted(highest.items()))

    async def pack(self, name: str, bucket: int) -> PackedBucket:
        """Makes all ranks write their shards of a bucket of plan `name` into the memory of the ranks that store this
        plan's buckets for the engines."""
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
        """Allows the memory of bucket number `bucket` of plan `name` to be reused. If `bucket` is None, the publication
        has ended, and every rank releases all of its buckets."""
        ranks = None if bucket is None else self._holders_of(name)
        await self.call("weights.release", f"the release of buckets ({name})", ranks=ranks, name=name, bucket=bucket)

    def _holders_of(self, name: str) -> range:
        """Returns the ranks whose memory contains the buckets of plan `name`."""
        return range(1 if name == "export" else self.holders)

    async def _prepare(self) -> None:
        """Determines, for each plan, whether every rank can write into the memory of every other rank or only into that
        of the publisher, and then sends the plan to all ranks."""
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
                f"the distribution of plan {name}",
                name=name,
                plan=stored,
                remote=remote,
                on_device=on_device,
                holders=holders,
            )

    async def _reach(self, rank: int, on_device: bool) -> list[bool]:
        """Returns, for each rank of the group, True if that rank can write into the memory of rank `rank`."""
        what = f"the check of access to the memory of rank {rank}"
        ((path, content),) = await self.call("weights.probe", what, ranks=[rank], on_device=on_device)
        return await self.call("weights.reaches", what, path=path, content=content)

    def _carried_from(self) -> Path | None:
        """Returns the Hugging Face directory from which an export copies tensors that the trainers do not have; None if
        there is no such directory."""
        weights = Path(self.config.initial_weights)
        if format_of(weights) is None:
            return weights
        model = Path(self.config.model.path)
        return model if any(model.glob("*.safetensors")) else None


def folded[T](shards: Sequence[Sequence[T]], shards_per_rank: int) -> list[list[T]]:
    """Merges every `shards_per_rank` consecutive shards into one list, the micro-batches of one data-parallel rank."""
    by_rank = []
    for first in range(0, len(shards), shards_per_rank):
        by_rank.append(list(chain.from_iterable(shards[first : first + shards_per_rank])))
    return by_rank


def unfolded[T](by_rank: Sequence[Sequence[T]], shards_per_rank: int) -> list[Sequence[T]]:
    """Undoes `folded`: splits each rank's merged list into one list per shard."""
    if shards_per_rank == 1:
        return list(by_rank)
    shards: list[Sequence[T]] = []
    for values in by_rank:
        count = len(values) // shards_per_rank
        shards += [values[i : i + count] for i in range(0, len(values), count)]
    return shards


def _values_of(name: str, shards: Sequence[Sequence[Mapping[str, np.ndarray]]]) -> list[list[np.ndarray]]:
    """Selects the value `name` from the result of each micro-batch. Returns one list of arrays per shard."""
    values = []
    for shard in shards:
        values.append([batch[name] for batch in shard])
    return values
