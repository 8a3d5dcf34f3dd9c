"""Layouts that fit: every split of the trainer's ranks that the model allows, with the least recomputation that fits
memory, ranked by `slimx.preflight.cost_model`; and engines with the most room.

`--suggest` keeps `trainer.world_size` and everything that decides what is learned (batch, precision, sequence lengths).
Where no split of so many ranks fits, it doubles them, up to 64 times.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import log2
from typing import Any, NamedTuple

from pydantic import ValidationError

from slimx.config.engines import Engines
from slimx.config.schema import Config
from slimx.config.trainer import Trainer
from slimx.errors import SlimxError
from slimx.layout.megatron import nearly_equal
from slimx.layout.ranks import Sizes, sizes_of
from slimx.models.families import ModelSpec
from slimx.models.trunk import read_trunk
from slimx.preflight.batch_plan import batch_plan
from slimx.preflight.colocated import colocated_memory
from slimx.preflight.constraints import batch_problems, memory_problems, together
from slimx.preflight.cost_model import update_cost
from slimx.preflight.hardware import Machine
from slimx.preflight.layout import divisor_problems
from slimx.preflight.memory_engine import engine_memory
from slimx.preflight.memory_trainer import trainer_memory
from slimx.preflight.plan_record import EngineMemory, EngineSuggestion, Suggestion, TrainerMemory

KEPT = 5
"""Suggestions told."""
LARGEST = 64
"""Times trainer.world_size that is tried where nothing smaller fits."""
SPLIT_TOKENS = 4096
"""Of the longest sequence on each rank, below which context parallelism is not suggested."""
_NONE = {"granularity": "none"}
_SELECTIVE = {"granularity": "selective", "modules": ["core_attn", "layernorm", "moe_act"]}
_FULL = {"granularity": "full", "method": "uniform", "layers": 1}
_RECOMPUTE: tuple[tuple[dict[str, Any], float | None], ...] = (
    (_NONE, None),
    (_SELECTIVE, None),
    (_FULL, None),
    (_FULL, 1),
)
"""(recompute, share of the moments on the host), each slower than the one before; None: as configured."""
Fields = dict[str, Any]


def suggest_layouts(config: Config, spec: ModelSpec, machine: Machine, device: str) -> tuple[Suggestion, ...]:
    """The cheapest layouts that fit, best first, of each tensor and pipeline size the best. Raises SlimxError where the
    GPUs are not named."""
    best: dict[tuple[int, int], Suggestion] = {}
    for found in sorted(_search(config, spec, machine, device), key=lambda found: found.suggestion.cost):
        best.setdefault((found.fields["tensor"], found.fields["pipeline"]), found.suggestion)
    return tuple(best.values())[:KEPT]


def nearest_layout(config: Config, spec: ModelSpec, machine: Machine, device: str) -> Suggestion | None:
    """The layout that fits with the fewest and smallest changes of the configured sizes; None: there is none."""
    found = _search(config, spec, machine, device)
    nearest = min(found, key=lambda f: (_distance(config.trainer, f.fields), f.suggestion.cost), default=None)
    return nearest.suggestion if nearest else None


class _Found(NamedTuple):
    fields: Fields
    """Of the trainer section."""
    suggestion: Suggestion


def _search(config: Config, spec: ModelSpec, machine: Machine, device: str) -> list[_Found]:
    """Layouts that fit, of the smallest world in which there are any."""
    _require(machine)
    groups = config.rollout.policy_engines if config.schedule.colocate else ()
    engines = tuple(engine_memory(config, spec, group, machine, staged=0) for group in groups)
    shared = config.critic is not None and config.critic.placement == "shared"
    trial = _Trial(config, spec, machine, device, engines, read_trunk(config) if shared else None)
    world = config.trainer.world_size
    while world <= LARGEST * config.trainer.world_size:
        tried = ((fields, trial.fit(fields)) for fields in _splits(config, spec, machine, world))
        if found := [_Found(fields, suggestion) for fields, suggestion in tried if suggestion is not None]:
            return found
        world *= 2
    return []


def _require(machine: Machine) -> None:
    if machine.gpu is None or machine.memory is None:
        raise SlimxError("layouts are searched for a kind of GPU: set cluster.gpu")


@dataclass(frozen=True, slots=True)
class _Trial:
    """Tries splits of the trainer's ranks."""

    config: Config
    spec: ModelSpec
    machine: Machine
    device: str
    engines: tuple[EngineMemory, ...]
    """On the same GPUs as the trainer."""
    trunk: ModelSpec | None
    """Of a critic in the trainer's ranks, split as the trainer is; one on ranks of its own is left as it is."""

    def fit(self, fields: Fields) -> Suggestion | None:
        """The split with the least recomputation that fits; None if it does not fit at all."""
        for recompute, offload in _RECOMPUTE:
            changed = {**fields, "recompute": recompute}
            if offload is not None:
                changed["optimizer"] = {**self.config.trainer.optimizer.model_dump(), "offload": offload}
            tried = with_trainer(self.config, changed)
            if tried is None:
                return None
            sizes = sizes_of(tried.trainer)
            if any(divisor_problems(sizes, self.spec)) or any(batch_problems(tried, self.spec, sizes, None)):
                return None
            records = trainer_memory(tried, self.spec, sizes, self.device, quick=True)
            critics = self._critics(tried, sizes)
            shared = colocated_memory(tried, self.machine, records, self.engines)
            if not any(memory_problems(tried, self.machine, records + critics, (), shared)):
                peak = max(map(together, records, critics) if critics else (record.peak for record in records))
                return self._told(tried, sizes, max(records, key=lambda record: record.peak), peak)
        return None

    def _critics(self, tried: Config, sizes: Sizes) -> tuple[TrainerMemory, ...]:
        if self.trunk is None:
            return ()
        return trainer_memory(tried.as_critic(), self.trunk, sizes, self.device, model="critic", quick=True)

    def _told(self, tried: Config, sizes: Sizes, fullest: TrainerMemory, peak: int) -> Suggestion:
        cost = update_cost(tried, self.spec, sizes, batch_plan(tried, sizes), fullest, self.machine)
        trainer = tried.trainer
        names = {"TP": trainer.tensor, "PP": trainer.pipeline, "VPP": trainer.virtual_pipeline, "CP": trainer.context}
        names |= {"EP": trainer.expert, "ETP": trainer.expert_tensor_size, "DP": trainer.data_size}
        layout = " x ".join(f"{name}{size}" for name, size in names.items() if size > 1 or name == "TP")
        host = f", {trainer.optimizer.offload:.0%} of the moments on the host" if trainer.optimizer.offload else ""
        return Suggestion(
            overrides=_overrides(self.config, tried),
            layout=f"{layout}, recompute {trainer.recompute.granularity}{host}",
            trainer_peak=peak,
            margin=self.machine.memory - peak,
            cost=round(cost.total, 4),
            why=cost.why,
        )


def _splits(config: Config, spec: ModelSpec, machine: Machine, world: int) -> Iterator[Fields]:
    """Every split of `world` ranks into sizes that are powers of 2, or those that divide world and model."""
    layers, experts = spec.table.layers, max(1, spec.experts)
    for tensor in _divisors(world, min(machine.domain, spec.transformer["num_query_groups"])):
        for pipeline in _divisors(world // tensor, layers):
            for context in _contexts(config, world // tensor // pipeline):
                data = world // tensor // pipeline // context
                stage = tensor * context * data
                for expert in _divisors(experts, stage):
                    for expert_tensor in sorted({1, tensor}) if expert > 1 else (tensor,):
                        if stage % (expert * expert_tensor):
                            continue
                        for virtual in _virtual(layers, pipeline):
                            split = nearly_equal(layers, pipeline * virtual) if layers % (pipeline * virtual) else None
                            yield {
                                "world_size": world,
                                "tensor": tensor,
                                "pipeline": pipeline,
                                "virtual_pipeline": virtual,
                                "layers_per_stage": split,
                                "context": context,
                                "data": None,
                                "expert": expert,
                                "expert_tensor": expert_tensor,
                            }


def _contexts(config: Config, ranks: int) -> list[int]:
    """The configured size, and those that leave each rank a sequence worth splitting."""
    longest = config.rollout.max_prompt_tokens + config.rollout.sampling.max_new_tokens
    worth = [n for n in _powers(ranks, 64) if n == 1 or longest >= n * SPLIT_TOKENS]
    return sorted({*worth, *(n for n in [config.trainer.context] if ranks % n == 0)})


def _divisors(number: int, largest: int) -> list[int]:
    return [n for n in range(1, min(number, largest) + 1) if number % n == 0]


def _powers(number: int, largest: int) -> list[int]:
    return [n for n in (2**k for k in range(10)) if n <= largest and number % n == 0]


def _virtual(layers: int, pipeline: int) -> tuple[int, ...]:
    return (1, 2) if pipeline > 1 and layers >= 2 * pipeline else (1,)


def with_trainer(config: Config, fields: Fields) -> Config | None:
    """`config` with other fields of its trainer; None if they do not fit each other."""
    try:
        trainer = Trainer.model_validate({**config.trainer.model_dump(), **fields})
    except ValidationError:
        return None
    return config.model_copy(update={"trainer": trainer})


def _overrides(config: Config, tried: Config) -> tuple[str, ...]:
    """What differs from the configuration, as arguments of the command line."""
    before, after = (c.trainer.model_dump(mode="json") for c in (config, tried))
    out = []
    for key, value in after.items():
        if key == "optimizer":
            if value["offload"] != before[key]["offload"]:
                out.append(f"trainer.optimizer.offload={value['offload']:g}")
        elif value != before[key]:
            if key == "recompute":
                value = {name: v for name, v in value.items() if v != before[key][name]}
                out += [f"trainer.recompute.{name}={_yaml(v)}" for name, v in value.items()]
            else:
                out.append(f"trainer.{key}={_yaml(value)}")
    return tuple(out)


def _yaml(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, str) else value


def _distance(trainer: Trainer, fields: Fields) -> float:
    """By how many doublings and halvings the sizes differ."""
    sizes = {**fields, "expert_tensor": fields["expert_tensor"] or fields["tensor"]}
    own = {**{key: getattr(trainer, key) for key in sizes}, "expert_tensor": trainer.expert_tensor_size}
    keys = ("world_size", "tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
    return sum(abs(log2(sizes[key] / own[key])) for key in keys)


def suggest_engines(config: Config, spec: ModelSpec, machine: Machine) -> tuple[EngineSuggestion, ...]:
    """For each group of the policy that slimx starts: the servers, on as many GPUs, that hold most rollouts at once, of
    these the smallest. Where none fits so many GPUs, they are doubled, up to 64 times."""
    _require(machine)
    out = []
    for group in config.rollout.policy_engines:
        gpus = group.started * group.tensor
        while group.started and gpus <= LARGEST * group.started * group.tensor:
            found = [_engine(config, spec, machine, group, sizes) for sizes in _engine_splits(gpus, group, machine)]
            if fitting := [each for each in found if each is not None and each.concurrency]:
                out.append(max(fitting, key=lambda each: (each.concurrency, -each.tensor, -each.dp_attention)))
                break
            gpus *= 2
    return tuple(out)


def _engine_splits(gpus: int, group: Engines, machine: Machine) -> Iterator[Fields]:
    experts = group.expert > 1
    for tensor in _powers(gpus, max(machine.domain, group.tensor, gpus // group.count)):
        for copies in _powers(tensor, 8):
            nodes = -(-tensor // machine.per_node)
            expert = tensor if experts else 1
            yield {"tensor": tensor, "expert": expert, "dp_attention": copies, "count": gpus // tensor, "nodes": nodes}


def _engine(
    config: Config, spec: ModelSpec, machine: Machine, group: Engines, fields: Fields
) -> EngineSuggestion | None:
    changed = group.model_copy(update=fields)
    try:
        record = engine_memory(config, spec, changed, machine, staged=0)
    except SlimxError:
        return None
    if record.static is None or record.weights > record.static:
        return None
    return EngineSuggestion(
        group=group.name,
        tensor=changed.tensor,
        expert=changed.expert,
        dp_attention=changed.dp_attention,
        count=changed.count,
        nodes=changed.nodes,
        weights=record.weights,
        concurrency=record.concurrency * changed.count,
    )
