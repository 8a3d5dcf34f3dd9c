"""Servers, on as many GPUs as configured, that hold most rollouts at once."""

from __future__ import annotations

from collections.abc import Iterator

from slimx.config.schema import Config
from slimx.config.sections.engines import Engines
from slimx.errors import SlimxError
from slimx.layout.table import Table
from slimx.models.families import ModelSpec
from slimx.preflight.hardware import Machine
from slimx.preflight.memory.engine import engine_memory, engine_table
from slimx.preflight.plan.splits import Fields, powers_of_two
from slimx.preflight.plan.suggest import LARGEST, require_gpu
from slimx.preflight.record import EngineSuggestion


def suggest_engines(config: Config, spec: ModelSpec, machine: Machine) -> tuple[EngineSuggestion, ...]:
    """For each group of the policy that slimx starts: the servers, on as many GPUs, that hold most rollouts at once, of
    these the smallest. Where none fits so many GPUs, they are doubled, up to 64 times."""
    require_gpu(machine)
    out = []
    for group in config.rollout.policy_engines:
        gpus, table = group.started * group.tensor, engine_table(spec, group)
        while group.started and gpus <= LARGEST * group.started * group.tensor:
            found = [
                _engine(config, spec, machine, group, table, sizes) for sizes in _engine_splits(gpus, group, machine)
            ]
            if fitting := [each for each in found if each is not None and each.concurrency]:
                out.append(max(fitting, key=lambda each: (each.concurrency, -each.tensor, -each.dp_attention)))
                break
            gpus *= 2
    return tuple(out)


def _engine_splits(gpus: int, group: Engines, machine: Machine) -> Iterator[Fields]:
    experts = group.expert > 1
    for tensor in powers_of_two(gpus, max(machine.domain, group.tensor, gpus // group.count)):
        for copies in powers_of_two(tensor, 8):
            nodes = -(-tensor // machine.per_node)
            expert = tensor if experts else 1
            yield {"tensor": tensor, "expert": expert, "dp_attention": copies, "count": gpus // tensor, "nodes": nodes}


def _engine(
    config: Config, spec: ModelSpec, machine: Machine, group: Engines, table: Table, fields: Fields
) -> EngineSuggestion | None:
    changed = group.model_copy(update=fields)
    try:
        record = engine_memory(config, spec, changed, machine, staged=0, table=table)
    except SlimxError:
        return None
    if record.static is None or record.weights > record.static:
        return None
    return EngineSuggestion(
        group=group.name,
        **fields,
        weights=record.weights,
        concurrency=record.concurrency * changed.count,
    )
