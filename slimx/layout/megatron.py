"""Determines which part of which tensor each trainer rank has, for any parallel sizes of megatron-core."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from slimx.errors import SlimxError, counted
from slimx.layout.maps import Rect
from slimx.layout.parts import Part, local_shape, matrix
from slimx.layout.ranks import Sizes
from slimx.layout.table import Entry, Row, Stage, Table


@dataclass(frozen=True, slots=True)
class MegatronLayout:
    """Distribution of the tensors of a family's weight table over trainer ranks. Raises SlimxError for sizes that do
    not fit the model."""

    table: Table
    sizes: Sizes

    def __post_init__(self) -> None:
        sizes = self.sizes
        table = self.table
        if sizes.virtual > 1 and sizes.pipeline == 1:
            raise SlimxError(
                f"trainer.virtual_pipeline={sizes.virtual} is not possible, because trainer.pipeline is 1; set "
                "trainer.virtual_pipeline=1, or raise trainer.pipeline",
                code="layout.virtual_pipeline",
                about="trainer.virtual_pipeline",
            )
        if sizes.split and (
            len(sizes.split) != sizes.stages or sum(sizes.split) != table.layers or min(sizes.split) < 0
        ):
            raise SlimxError(
                f"trainer.layers_per_stage={list(sizes.split)} does not distribute {table.layers} layers over "
                f"{sizes.stages} stages (trainer.pipeline x trainer.virtual_pipeline); set, for example, "
                f"trainer.layers_per_stage={nearly_equal(table.layers, sizes.stages)}",
                code="layout.layers_per_stage",
                about="trainer.layers_per_stage",
            )
        if not sizes.split and table.layers % sizes.stages:
            virtual = f" x trainer.virtual_pipeline={sizes.virtual}" if sizes.virtual > 1 else ""
            raise SlimxError(
                f"trainer.pipeline={sizes.pipeline}{virtual} does not divide the model's {table.layers} layers; "
                "choose a divisor, or set the layers of each stage, as in "
                f"trainer.layers_per_stage={nearly_equal(table.layers, sizes.stages)}",
                code="layout.pipeline",
                about="trainer.pipeline",
            )
        if sizes.expert > 1 and not table.experts:
            raise SlimxError(
                f"trainer.expert={sizes.expert} splits experts, but the model has no experts; set trainer.expert=1",
                code="layout.experts",
                about="trainer.expert",
            )
        if table.experts % sizes.expert:
            raise SlimxError(
                f"trainer.expert={sizes.expert} does not divide the model's {table.experts} experts; "
                "choose a divisor of that number",
                code="layout.experts",
                about="trainer.expert",
            )
        if sizes.stage % (sizes.expert * sizes.expert_tensor):
            raise SlimxError(
                f"trainer.expert={sizes.expert} x trainer.expert_tensor={sizes.expert_tensor} does not divide the "
                f"{counted(sizes.stage, 'rank')} of a pipeline stage; lower trainer.expert or raise trainer.data",
                code="layout.expert_ranks",
                about="trainer.expert",
            )

    def parts(self) -> Iterator[Part]:
        """Yields every distinct local tensor of all trainer ranks, with the ranks that store it."""
        yield from self._parts(None)

    def parts_of(self, rank: int) -> list[Part]:
        """Returns the local tensors of rank `rank`, in checkpoint order."""
        return [part for part in self._parts(rank // self.sizes.stage) if rank in part.ranks]

    def _parts(self, only: int | None) -> Iterator[Part]:
        """Yields the local tensors of pipeline rank `only`, or of all pipeline ranks if it is None."""
        sizes = self.sizes
        table = self.table
        layers = sizes.split or (table.layers // sizes.stages,) * sizes.stages
        first = [0, *accumulate(layers)]
        stage_of: list[int] = []
        for stage, count in enumerate(layers):
            stage_of += [stage] * count
        end_stages: dict[Stage, int] = {"first": 0, "last": sizes.stages - 1, "mtp": sizes.stages - 1}
        experts = max(1, table.experts // sizes.expert)
        shards = _Shards(sizes)
        for entry in table.entries():
            row = entry.row
            original = stage_of[entry.layer] if row.stage == "layer" else end_stages[row.stage]
            homes = [(original, row.name, False)]
            for copy_stage, copy_name in row.copies:
                if end_stages[copy_stage] != original:
                    homes.append((end_stages[copy_stage], copy_name, True))
            for stage, name, copy in homes:
                chunk, pipeline_rank = divmod(stage, sizes.pipeline)
                if only is not None and pipeline_rank != only:
                    continue
                before = table.layers if row.stage == "mtp" else first[stage]
                local = name.format(layer=entry.layer - before, expert=entry.expert % experts)
                # With VPP the model of a rank is a list of modules, one per chunk.
                local = f"{chunk}.{local}" if sizes.virtual > 1 else local
                owner = entry.expert // experts if row.per_expert else None
                for shard, shape, rects in shards.geometry(entry):
                    ranks = shards.ranks(pipeline_rank, shard, owner)
                    yield Part(local, shape, ranks, entry.sources, rects, row.dtype, row.quantized, copy)


def nearly_equal(layers: int, stages: int) -> list[int]:
    """Divides `layers` decoder layers among `stages` stages and returns each stage's number of layers; the numbers
    differ by at most one.

    Remaining layers are assigned to the first and the last stage only if necessary, because these stages also contain
    the embedding and the output layer."""
    least, extra = divmod(layers, stages)
    preferred = [*range(1, stages - 1), 0, stages - 1] if stages > 1 else [0]
    counts = [least] * stages
    for stage in preferred[:extra]:
        counts[stage] += 1
    return counts


Geometry = tuple[int | None, tuple[int, ...], tuple[Rect, ...]]


class _Shards:
    """Cache of the shapes, rectangles and ranks of shards, which are the same for all layers and experts."""

    def __init__(self, sizes: Sizes):
        self.sizes = sizes
        self._geometry: dict[int, list[Geometry]] = {}
        self._ranks: dict[tuple[int, int | None, int | None], tuple[int, ...]] = {}

    def geometry(self, entry: Entry) -> list[Geometry]:
        """Returns (index, local shape, rectangles) of each shard of the entry's tensor; the index is None if the tensor
        is not split."""
        key = id(entry.row)
        if key not in self._geometry:
            self._geometry[key] = [self._shard(entry.row, index) for index in self._indices(entry.row)]
        return self._geometry[key]

    def ranks(self, pipeline_rank: int, shard: int | None, owner: int | None) -> tuple[int, ...]:
        """Returns the ranks of pipeline rank `pipeline_rank` that store shard `shard` of a tensor, or the whole tensor
        if `shard` is None.

        `owner`: expert-parallel rank that stores the expert; None for tensors that do not belong to an expert."""
        key = pipeline_rank, shard, owner
        if key not in self._ranks:
            size = self.sizes.tensor
            stride = self.sizes.tensor
            start = pipeline_rank * self.sizes.stage
            if owner is not None:
                size = self.sizes.expert_tensor
                stride = size * self.sizes.expert
                start += size * owner
            ranks: list[int] = []
            for replica in range(start, start + self.sizes.stage, stride):
                if shard is None:
                    ranks.extend(range(replica, replica + size))
                else:
                    ranks.append(replica + shard)
            self._ranks[key] = tuple(ranks)
        return self._ranks[key]

    def _indices(self, row: Row) -> range | tuple[None]:
        if row.axis is None:
            return (None,)
        return range(self.sizes.expert_tensor if row.per_expert else self.sizes.tensor)

    def _shard(self, row: Row, index: int | None) -> Geometry:
        size = len(self._indices(row))
        shapes = [matrix(shape) for _, shape in row.sources]
        try:
            shape, rects = row.map.local(shapes, row.axis, index or 0, size)
        except SlimxError as error:
            raise SlimxError(f"trainer tensor {row.name}: {error}", code="layout.tensor", about=row.name) from None
        return index, local_shape(shape, row.sources), tuple(rects)
