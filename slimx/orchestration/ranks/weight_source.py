"""The tensors that leave the trainers by one plan, as the publisher reads them (`slimx.reshard.parties.Source`)."""

from __future__ import annotations

from slimx.orchestration.ranks.trainers import TrainerGroup
from slimx.reshard.manifest import Manifest
from slimx.reshard.packed import PackedBucket


class WeightSource:
    """The tensors of plan `name` of a group of trainers, whose plans and ranks may be replaced."""

    def __init__(self, trainers: TrainerGroup, name: str):
        self.trainers, self.name = trainers, name

    async def begin(self, manifest: Manifest) -> None:
        """Nothing to prepare: weights are gathered as they are."""

    async def forms(self) -> list[dict[str, str]]:
        return self.trainers.plans[self.name].forms()

    async def bucket_count(self) -> int:
        return self.trainers.plans[self.name].plan.count

    async def gather(self, bucket: int) -> PackedBucket:
        return await self.trainers.pack(self.name, bucket)

    async def release(self, bucket: int | None = None) -> None:
        await self.trainers.release(self.name, bucket)
