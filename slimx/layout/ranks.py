"""Coordinates of ranks in each parallel dimension, computed without process groups: trainer ranks in megatron-core's
default order (tp-cp-ep-dp-pp), engine ranks in SGLang's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate

from slimx.config.sections.engines import Engines
from slimx.config.sections.trainer import Trainer
from slimx.errors import SlimxError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Parallel sizes of the trainer, set in section `trainer` of the configuration.

    `data`: number of data-parallel ranks. `expert_tensor`: tensor-parallel size of experts. `context`: context-parallel
    size."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    expert_tensor: int = 1
    context: int = 1
    virtual: int = 1
    """Number of model chunks per pipeline rank (VPP); chunk v of pipeline rank p is stage v * pipeline + p."""
    split: tuple[int, ...] = ()
    """Number of layers in each of the pipeline * virtual stages; empty if all stages have equally many."""

    @property
    def stage(self) -> int:
        """Number of ranks in one pipeline stage: tensor x context x data."""
        return self.tensor * self.context * self.data

    @property
    def world(self) -> int:
        return self.stage * self.pipeline

    @property
    def stages(self) -> int:
        """Number of stages (pipeline x virtual) over which the layers are distributed, in the order of the forward
        pass."""
        return self.pipeline * self.virtual

    @property
    def sequence_multiple(self) -> int:
        """Required divisor of the length of each packed sequence: 2 x context, because context parallelism divides each
        sequence into two zigzag halves per rank; 1 without context parallelism."""
        return 2 * self.context if self.context > 1 else 1

    def packed_length(self, tokens: int) -> int:
        """Returns the length of a sequence of `tokens` tokens after padding to a multiple of `sequence_multiple`."""
        return -(-tokens // self.sequence_multiple) * self.sequence_multiple


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Coordinates of one trainer rank in the parallel dimensions of dense layers (`tensor`, `context`, `data`) and of
    experts (`expert_tensor`, `expert`, `expert_data`)."""

    tensor: int
    data: int
    pipeline: int
    expert_tensor: int
    expert: int
    expert_data: int
    context: int = 0


def fewer(sizes: Sizes) -> Iterator[Sizes]:
    """Yields the parallel sizes with which a run can continue after it has lost ranks: `sizes` with fewer data-parallel
    ranks, the largest number first.

    The new number of data-parallel ranks divides the old one, so each rank takes over complete shards of several former
    ranks. The number of ranks in a pipeline stage is still divisible by `expert * expert_tensor`."""
    for data in range(sizes.data - 1, 0, -1):
        stage = sizes.tensor * sizes.context * data
        if sizes.data % data == 0 and stage % (sizes.expert * sizes.expert_tensor) == 0:
            yield replace(sizes, data=data)


def coordinates(rank: int, sizes: Sizes) -> Coordinates:
    """Returns the coordinates of the trainer rank with global index `rank`."""
    stage, inside = divmod(rank, sizes.stage)
    expert_data, rest = divmod(inside, sizes.expert * sizes.expert_tensor)
    return Coordinates(
        tensor=inside % sizes.tensor,
        data=inside // (sizes.tensor * sizes.context),
        pipeline=stage,
        expert_tensor=rest % sizes.expert_tensor,
        expert=rest // sizes.expert_tensor,
        expert_data=expert_data,
        context=inside // sizes.tensor % sizes.context,
    )


def stage_layers(sizes: Sizes, layers: int) -> list[tuple[int, ...]]:
    """Returns, for each pipeline rank, the indices of its decoder layers, chunk by chunk. Layers are numbered from 0
    over the whole model."""
    counts = sizes.split or (layers // sizes.stages,) * sizes.stages
    first = [0, *accumulate(counts)]
    layers_of_ranks: list[tuple[int, ...]] = []
    for rank in range(sizes.pipeline):
        indices: list[int] = []
        for stage in range(rank, sizes.stages, sizes.pipeline):
            indices.extend(range(first[stage], first[stage] + counts[stage]))
        layers_of_ranks.append(tuple(indices))
    return layers_of_ranks


def sizes_of(config: Trainer) -> Sizes:
    """Returns the parallel sizes that section `trainer` of the configuration sets."""
    return Sizes(
        tensor=config.tensor,
        pipeline=config.pipeline,
        data=config.data_size,
        expert=config.expert,
        expert_tensor=config.expert_tensor_size,
        context=config.context,
        virtual=config.virtual_pipeline,
        split=config.layers_per_stage or (),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizes:
    """Parallel sizes of one SGLang engine, in which rank = pipeline rank * tensor + tensor rank.

    Attention is split over `tensor / attention_data` ranks and replicated `attention_data` times (DP-attention).
    Experts are distributed over `expert` groups of ranks, and each expert is split over the `tensor / expert` ranks of
    its group. Raises SlimxError for sizes that do not divide `tensor`."""

    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    attention_data: int = 1
    redundant: int = 0
    """Number of physical experts beyond the model's own, for expert load balancing; physical expert p is a copy of
    logical expert p mod the number of logical experts."""
    key: str = field(default="rollout.engines", compare=False)
    """Key of the list that contains the engine's group, for messages."""

    def __post_init__(self) -> None:
        for name, size in (("expert", self.expert), ("dp_attention", self.attention_data)):
            if self.tensor % size:
                raise SlimxError(
                    f"{name}={size} does not divide the {self.tensor} tensor-parallel ranks of an engine; choose a "
                    "divisor of that number",
                    code="engines.divides",
                    about=name,
                )

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline

    @property
    def attention_tensor(self) -> int:
        """Number of ranks over which one copy of the attention is split."""
        return self.tensor // self.attention_data

    @property
    def expert_tensor(self) -> int:
        """Number of ranks over which one expert is split."""
        return self.tensor // self.expert


def engine_sizes(group: Engines) -> EngineSizes:
    """Returns the parallel sizes of each engine in the engine group `group`. Raises SlimxError, about a key of the
    group, for invalid or unsupported sizes."""
    if group.pipeline > 1 and not group.frozen:
        raise SlimxError(
            f"pipeline={group.pipeline} is not supported, because SGLang 0.5.23 returns responses only from the first "
            "stage, so the weights of other stages could not be verified; set pipeline=1, and use tensor or expert "
            "parallelism instead",
            code="engines.pipeline",
            about="pipeline",
        )
    redundant = group.sglang.get("ep_num_redundant_experts", 0)
    if type(redundant) is not int or redundant < 0:
        raise SlimxError(
            f"sglang.ep_num_redundant_experts={redundant!r} is not a number of experts; set an integer of 0 or more",
            about="sglang.ep_num_redundant_experts",
        )
    return EngineSizes(
        tensor=group.tensor,
        expert=group.expert,
        pipeline=group.pipeline,
        attention_data=group.dp_attention,
        redundant=redundant,
        key=group.key,
    )
