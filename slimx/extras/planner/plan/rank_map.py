"""The map of ranks, GPUs and what they hold: trainers fill the nodes in the order of their ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from slimx.config.sections.engines import Engines
from slimx.config.sections.rollout import Rollout
from slimx.config.sections.schedule import Schedule
from slimx.extras.planner.record import EnginePlace, RankMap, RankPlace
from slimx.layout.ranks import Sizes, coordinates, stage_layers
from slimx.models.families import ModelSpec


def rank_map(
    rollout: Rollout,
    schedule: Schedule,
    spec: ModelSpec,
    sizes: Sizes,
    critic: Sizes | None,
    *,
    per_node: int,
    first: int = 0,
) -> RankMap:
    """The map of one policy from GPU `first` on; `critic`: sizes of a critic on ranks of its own, which follow the
    trainer's.

    Engines come last, or on the trainers' GPUs in turns with them (`schedule.colocate`). A server that fits a node does
    not straddle two."""
    trainer = _places(spec, sizes, first, per_node)
    own = _places(spec, critic, first + sizes.world, per_node) if critic is not None else ()
    apart = first + len(trainer) + len(own)
    engines, at = _servers(rollout.policy_engines, first if schedule.colocate else apart, per_node)
    frozen, at = _servers(rollout.frozen_engines, max(at, apart), per_node)
    end = max(apart, at)
    return RankMap(
        gpus=end - first,
        nodes=-(-end // per_node) - first // per_node,
        per_node=per_node,
        trainer=trainer,
        critic=own,
        engines=engines,
        frozen=frozen,
    )


def _servers(groups: Sequence[Engines], at: int, per_node: int) -> tuple[tuple[EnginePlace, ...], int]:
    """The servers that slimx starts, from GPU `at` on, and the GPU after the last one."""
    engines = []
    for group in groups:
        for server in range(group.started):
            if at % per_node + group.ranks > per_node:
                at = -(-at // per_node) * per_node
            engines.append(
                EnginePlace(
                    group=group.name, server=server, node=at // per_node, gpus=tuple(range(at, at + group.ranks))
                )
            )
            at += group.ranks
    return tuple(engines), at


def _places(spec: ModelSpec, sizes: Sizes, first: int, per_node: int) -> tuple[RankPlace, ...]:
    layers = stage_layers(sizes, spec.table.layers)
    experts = spec.experts // sizes.expert
    out = []
    for rank in range(sizes.world):
        place = coordinates(rank, sizes)
        node, gpu = divmod(first + rank, per_node)
        out.append(
            RankPlace(
                rank=rank,
                node=node,
                gpu=gpu,
                **asdict(place),
                layers=layers[place.pipeline],
                experts=(place.expert * experts, (place.expert + 1) * experts - 1) if experts else None,
            )
        )
    return tuple(out)
