"""The rank map: the GPU and the part of the model of every rank. Trainer ranks fill the nodes in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from slimx.config.sections.engines import Engines, ServedEngines
from slimx.config.sections.general import Schedule
from slimx.extras.planner.record import EnginePlace, RankMap, RankPlace
from slimx.layout.ranks import Sizes, coordinates, stage_layers
from slimx.models.families import ModelSpec


def rank_map(
    served: ServedEngines,
    schedule: Schedule,
    spec: ModelSpec,
    sizes: Sizes,
    critic: Sizes | None,
    *,
    per_node: int,
    first: int = 0,
) -> RankMap:
    """Returns the rank map of one policy, whose first GPU has the index `first`.

    `critic`: parallel sizes of a critic on separate ranks, which follow the trainer's ranks; None without one. Engines
    come last, or share the trainers' GPUs (`schedule.colocate`). A server that fits on one node is not split over two.
    `per_node`: number of GPUs per node."""
    trainers = _places(spec, sizes, first, per_node)
    critics: tuple[RankPlace, ...] = ()
    if critic is not None:
        critics = _places(spec, critic, first + sizes.world, per_node)
    trainers_end = first + len(trainers) + len(critics)
    engines, end = _servers(served.sampling, first if schedule.colocate else trainers_end, per_node)
    evaluation, end = _servers(served.evaluation, max(end, trainers_end), per_node)
    frozen, end = _servers(served.frozen, max(end, trainers_end), per_node)
    return RankMap(
        gpus=end - first,
        nodes=-(-end // per_node) - first // per_node,
        per_node=per_node,
        trainer=trainers,
        critic=critics,
        engines=engines + evaluation,
        frozen=frozen,
    )


def _servers(groups: Sequence[Engines], gpu: int, per_node: int) -> tuple[tuple[EnginePlace, ...], int]:
    """Assigns GPUs to the servers that slimx starts, from the GPU with index `gpu` on. Returns the place of each
    server, and the index of the GPU after the last one used."""
    engines = []
    for group in groups:
        for server in range(group.started):
            if gpu % per_node + group.ranks > per_node:
                gpu = -(-gpu // per_node) * per_node
            gpus = tuple(range(gpu, gpu + group.ranks))
            engines.append(EnginePlace(group=group.name, server=server, node=gpu // per_node, gpus=gpus))
            gpu += group.ranks
    return tuple(engines), gpu


def _places(spec: ModelSpec, sizes: Sizes, first: int, per_node: int) -> tuple[RankPlace, ...]:
    layers = stage_layers(sizes, spec.table.layers)
    experts = spec.experts // sizes.expert
    out = []
    for rank in range(sizes.world):
        place = coordinates(rank, sizes)
        node, gpu = divmod(first + rank, per_node)
        first_expert = place.expert * experts
        out.append(
            RankPlace(
                rank=rank,
                node=node,
                gpu=gpu,
                **asdict(place),
                layers=layers[place.pipeline],
                experts=(first_expert, first_expert + experts - 1) if experts else None,
            )
        )
    return tuple(out)
