"""The critic of a run, which is on the trainer ranks or on dedicated ranks."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from pathlib import Path

import numpy as np

from slimx.config.schema import Config
from slimx.data.batch import LazyRow, TrainingRow
from slimx.layout.ranks import Sizes
from slimx.orchestration.batches import Packer
from slimx.orchestration.ranks.group import RankGroup
from slimx.orchestration.ranks.trainers import TrainerGroup

_UNREAD = "routed_experts", "support", "teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs"


class CriticGroup:
    """All ranks that contain a part of the critic; they are called together. Callers pass training rows in any order;
    this class packs the rows for the critic's parallel sizes, which may differ from the policy's."""

    def __init__(
        self, config: Config, sizes: Sizes, packer: Packer, *, trainers: TrainerGroup, log_dir: Path, device: str
    ):
        """Creates the actors of dedicated ranks if `critic.placement` is "own"; else the critic is on the ranks of
        `trainers`. `sizes` and `packer`: the critic's parallel sizes and the function that packs rows for them."""
        self.sizes = sizes
        self.packer = packer
        self.dedicated: RankGroup | None = None
        if config.critic is not None and config.critic.placement == "own":
            self.dedicated = RankGroup("critic", config.as_critic(), sizes, log_dir, device, ["critic"])
        self.ranks: RankGroup = trainers if self.dedicated is None else self.dedicated

    async def start(self) -> None:
        """Starts the dedicated ranks, if any. Without dedicated ranks, the critic starts together with the trainer
        ranks."""
        if self.dedicated is not None:
            await self.dedicated.start()

    async def stop(self) -> None:
        if self.dedicated is not None:
            await self.dedicated.stop()

    async def values(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        """Returns the critic's value at every position, one array of shape [positions] per training row."""
        rows = _bare(rows)
        batch = self.packer(rows)
        shards = await self.ranks.sharded(batch.shards)
        results = await self.ranks.call("critic.values", "the critic's values", per_rank=shards)
        return batch.unpack(self.ranks.by_shard(results), rows)

    async def train_step(self, updates: Sequence[Sequence[TrainingRow]], *, step: int) -> dict[str, float]:
        """Trains the critic on `updates` with one optimizer step each, and returns the metrics of the whole step. The
        rows must have `values` and `returns`."""
        by_update = []
        for rows in updates:
            by_update.append(self.packer(_bare(rows)).shards)
        shards = [list(shards) for shards in zip(*by_update, strict=True)]
        per_rank = await self.ranks.sharded(shards)
        results = await self.ranks.call(
            "critic.train_updates", f"training step {step} of the critic", per_rank=per_rank, step=step
        )
        return self.ranks.metrics_of(results)


def _bare(rows: Sequence[TrainingRow]) -> list[TrainingRow]:
    """Returns copies of `rows` without the columns that a critic does not need: a teacher's log-probs, the tokens that
    top-k or top-p sampling kept, and the experts that the engine chose (a critic's routers choose other experts)."""
    copies = [copy(row) for row in rows]
    parts: list[object] = [*copies]
    for row in copies:
        if isinstance(row, LazyRow):
            row.trajectory = copy(row.trajectory)
            parts.append(row.trajectory)
    for part in parts:
        for name in _UNREAD:
            setattr(part, name, None)
    return copies
