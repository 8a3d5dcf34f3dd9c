"""Where a rank stands in each parallel dimension, by arithmetic alone (megatron-core's default order
tp-cp-ep-dp-pp)."""

from __future__ import annotations

from dataclasses import dataclass

from slimx.config.schema import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Parallel sizes of the trainer. `data` counts the ranks that see different data (DP)."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    expert_tensor: int = 1

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tensor * self.data

    @property
    def world(self) -> int:
        return self.stage * self.pipeline


@dataclass(frozen=True, slots=True)
class Coordinates:
    """One rank's place: within the dense layers (`tensor`, `data`) and within the experts (`expert_*`)."""

    tensor: int
    data: int
    pipeline: int
    expert_tensor: int
    expert: int
    expert_data: int


def coordinates(rank: int, sizes: Sizes) -> Coordinates:
    """The place of global rank `rank`."""
    stage, inside = divmod(rank, sizes.stage)
    expert_data, rest = divmod(inside, sizes.expert * sizes.expert_tensor)
    return Coordinates(
        tensor=inside % sizes.tensor,
        data=inside // sizes.tensor,
        pipeline=stage,
        expert_tensor=rest % sizes.expert_tensor,
        expert=rest // sizes.expert_tensor,
        expert_data=expert_data,
    )


def sizes_of(config: Trainer) -> Sizes:
    """Parallel sizes of a trainer configuration."""
    return Sizes(
        tensor=config.tensor,
        pipeline=config.pipeline,
        data=config.data_size,
        expert=config.expert,
        expert_tensor=config.expert_tensor_size,
    )
