"""Sizes of engine servers with the highest concurrency, for the configured number of GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from slimx.config.rule import all_rules, broken
from slimx.config.schema import Config
from slimx.config.sections.engines import Engines
from slimx.errors import SlimxError
from slimx.extras.planner.memory.engine import engine_memory, engine_table
from slimx.extras.planner.plan.splits import Fields, powers_of_two
from slimx.extras.planner.plan.suggest import LARGEST, require_gpu
from slimx.extras.planner.record import EngineSuggestion
from slimx.layout.table import Table
from slimx.models.families import ModelSpec
from slimx.preflight.hardware import Machine


def suggest_engines(config: Config, spec: ModelSpec, machine: Machine) -> tuple[EngineSuggestion, ...]:
    """Returns, for each of the policy's engine groups that slimx starts, the server size that holds the most concurrent
    rollouts on the configured number of GPUs; of equally good sizes, the smallest.

    If no size fits, the number of GPUs is doubled until one does, up to 64 times the configured number."""
    require_gpu(machine)
    out = []
    for group in config.served.sampling:
        table = engine_table(spec, group)
        gpus = group.started * group.tensor
        largest = LARGEST * gpus
        while 0 < gpus <= largest:
            fitting: list[EngineSuggestion] = []
            for sizes in _engine_splits(gpus, group, machine):
                suggestion = _engine(config, spec, machine, group, table, sizes)
                if suggestion is not None:
                    fitting.append(suggestion)
            if fitting:
                out.append(max(fitting, key=_preference))
                break
            gpus *= 2
    return tuple(out)


def _preference(suggestion: EngineSuggestion) -> tuple[int, int, int]:
    return suggestion.concurrency, -suggestion.tensor, -suggestion.dp_attention


def _engine_splits(gpus: int, group: Engines, machine: Machine) -> Iterator[Fields]:
    for tensor in powers_of_two(gpus, max(machine.domain, group.tensor, gpus // group.count)):
        for copies in powers_of_two(tensor, 8):
            yield {
                "tensor": tensor,
                "expert": tensor if group.expert > 1 else 1,
                "dp_attention": copies,
                "count": gpus // tensor,
                "nodes": -(-tensor // machine.per_node),
            }


def _engine(
    config: Config, spec: ModelSpec, machine: Machine, group: Engines, table: Table, fields: Fields
) -> EngineSuggestion | None:
    """Returns the suggestion for servers with the sizes `fields`; None if not even one rollout fits or a rule does not
    allow the sizes."""
    changed = group.model_copy(update=fields)
    groups = []
    for candidate in config.rollout.engines:
        groups.append(changed if candidate is group else candidate)
    rollout = config.rollout.model_copy(update={"engines": groups})
    try:
        record = engine_memory(config, spec, changed, machine, staged=0, table=table)
    except SlimxError:
        return None
    if not record.fits or record.concurrency is None:
        return None
    if broken(all_rules(), config.model_copy(update={"rollout": rollout}).facts):
        return None
    concurrency = record.concurrency * changed.count
    return EngineSuggestion(group=group.name, **fields, weights=record.weights, concurrency=concurrency)
