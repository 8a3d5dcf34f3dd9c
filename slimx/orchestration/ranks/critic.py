"""The critic of a run, in the trainers' ranks or in ranks of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from slimx.config.schema import Config
from slimx.data.batch import TrainingRow
from slimx.data.columns import COLUMNS
from slimx.layout.ranks import Sizes
from slimx.orchestration.batches import Packer
from slimx.orchestration.ranks.group import RankGroup
from slimx.orchestration.ranks.trainers import TrainerGroup


class CriticGroup:
    """Every rank that holds a part of the critic. Rows come and go in the order of the caller's; how they are packed
    for the critic is its own matter, since its layout may be another than the policy's."""

    def __init__(
        self, config: Config, sizes: Sizes, packer: Packer, *, trainers: TrainerGroup, log_dir: Path, device: str
    ):
        """`sizes` and `packer`: of the critic."""
        self.sizes, self.packer = sizes, packer
        self.own: RankGroup | None = None
        if config.critic.placement == "own":
            self.own = RankGroup("critic", config.as_critic(), sizes, log_dir, device, ["critic"])
        self.ranks: RankGroup = self.own or trainers

    async def start(self) -> None:
        """Bring up the critic's own ranks; those of the trainers start with a critic in them."""
        if self.own is not None:
            await self.own.start()

    async def stop(self) -> None:
        if self.own is not None:
            await self.own.stop()

    async def values(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        """Value at every position, one [n] per row."""
        rows = _bare(rows)
        batch = self.packer(rows)
        each = await self.ranks.sharded(batch.shards)
        results = await self.ranks.call("critic.values", "the critic's values", each=each)
        return batch.unpack(self.ranks.by_shard(results), rows)

    async def train_step(self, updates: Sequence[Sequence[TrainingRow]], *, step: int) -> dict[str, float]:
        """One optimizer step per update on rows with `values` and `returns`; the metrics of them all."""
        batches = [self.packer(_bare(rows)) for rows in updates]
        shards = [list(shards) for shards in zip(*(batch.shards for batch in batches), strict=True)]
        what, each = f"step {step} of the critic", await self.ranks.sharded(shards)
        return self.ranks.metrics_of(await self.ranks.call("critic.train_updates", what, each=each, step=step))


def _bare(rows: Sequence[TrainingRow]) -> list[TrainingRow]:
    """Copies without columns for the policy alone: a teacher's, kept tokens, and the engine's experts (a critic has
    routers of its own)."""
    needed = [name for name, column in COLUMNS.items() if column.needed is not None]
    return [replace(row, **dict.fromkeys((*needed, "routed_experts", "support"))) for row in rows]
