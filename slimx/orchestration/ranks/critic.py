"""The critic of a run, on the trainers' ranks or on dedicated ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from slimx.config.schema import Config
from slimx.data.batch import TrainingRow
from slimx.data.columns import COLUMNS
from slimx.layout.ranks import Sizes
from slimx.orchestration.batches import Packer
from slimx.orchestration.ranks.group import RankGroup
from slimx.orchestration.ranks.trainers import TrainerGroup


class CriticGroup:
    """All ranks that hold a part of the critic. Rows are passed in the caller's order and packed for the critic's
    layout, which may differ from the policy's."""

    def __init__(
        self, config: Config, sizes: Sizes, packer: Packer, *, trainers: TrainerGroup, log_dir: Path, device: str
    ):
        """Sets up the group. `sizes` and `packer`: of the critic."""
        self.sizes = sizes
        self.packer = packer
        self.dedicated: RankGroup | None = None
        if config.critic is not None and config.critic.placement == "own":
            self.dedicated = RankGroup("critic", config.as_critic(), sizes, log_dir, device, ["critic"])
        self.ranks: RankGroup = trainers if self.dedicated is None else self.dedicated

    async def start(self) -> None:
        """Starts the critic's dedicated ranks; the trainers' ranks start with a critic in them."""
        if self.dedicated is not None:
            await self.dedicated.start()

    async def stop(self) -> None:
        if self.dedicated is not None:
            await self.dedicated.stop()

    async def values(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        """Returns the value at every position, one [n] per row."""
        rows = _bare(rows)
        batch = self.packer(rows)
        shards = await self.ranks.sharded(batch.shards)
        results = await self.ranks.call("critic.values", "the critic's values", per_rank=shards)
        return batch.unpack(self.ranks.by_shard(results), rows)

    async def train_step(self, updates: Sequence[Sequence[TrainingRow]], *, step: int) -> dict[str, float]:
        """Runs one optimizer step per update on rows with `values` and `returns`; returns the metrics of all."""
        by_update = []
        for rows in updates:
            by_update.append(self.packer(_bare(rows)).shards)
        shards = [list(shards) for shards in zip(*by_update, strict=True)]
        per_rank = await self.ranks.sharded(shards)
        results = await self.ranks.call(
            "critic.train_updates", f"step {step} of the critic", per_rank=per_rank, step=step
        )
        return self.ranks.metrics_of(results)


def _bare(rows: Sequence[TrainingRow]) -> list[TrainingRow]:
    """Returns copies without columns that only the policy needs: the teacher's, kept tokens, and the engine's experts
    (a critic has its own routers)."""
    emptied: dict[str, Any] = {"routed_experts": None, "support": None}  # `replace` takes fields of several types
    for name, column in COLUMNS.items():
        if column.needed is not None:
            emptied[name] = None
    return [replace(row, **emptied) for row in rows]
