"""The report of `slimx plan`, which describes a run from its configuration and the model's config.json alone.

    config.json --> layout, rank map --> memory of trainers and engines --> violations
                            |
                            +--> publication, compiled and checked --> bytes per link

It needs no weights, no prompts and no GPU, so a run on hundreds of GPUs can be checked on a laptop. Everything is
compiled with the run's own functions, so the run will follow exactly the plan that is printed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slimx.config.rule import Rule, all_rules, broken
from slimx.config.schema import Config
from slimx.config.sections.engines import Engines
from slimx.config.sections.policies import Policy
from slimx.errors import SlimxError
from slimx.extras.planner.batch_plan import batch_plan, rollout_load
from slimx.extras.planner.memory.engine import engine_memory
from slimx.extras.planner.memory.node import disk_bytes, host_memory, kept_batches
from slimx.extras.planner.memory.phases import colocated_memory, phase_memory
from slimx.extras.planner.memory.publication import MergingBytes, merging_memory, packed_on_gpu
from slimx.extras.planner.memory.trainer import trainer_memory
from slimx.extras.planner.memory_record import EngineMemory, TrainerMemory
from slimx.extras.planner.plan.activation_strategies import without_refused_offloads
from slimx.extras.planner.plan.publication import (
    CompiledPublication,
    compile_publication,
    publication_figures,
    publication_links,
)
from slimx.extras.planner.plan.rank_map import rank_map
from slimx.extras.planner.record import PlannedGroup, PlanReport, PublicationFigures, RankMap
from slimx.extras.planner.rules.machine import (
    crowded_warnings,
    has_nodes,
    idle_warnings,
    machine_warnings,
    start_warnings,
    unused_warnings,
)
from slimx.extras.planner.rules.memory import margin_warnings
from slimx.layout.ranks import EngineSizes, Sizes, engine_sizes
from slimx.models.families import ModelSpec, configured_model
from slimx.preflight.facts import model_facts
from slimx.preflight.hardware import Machine, machine_of
from slimx.preflight.transport import choose_transport
from slimx.reshard.plan.publication import PublicationPlan

OF_LAYOUT = ("memory.trainer", "memory.colocated", "memory.host")
"""Codes of rules that another parallel layout of the trainer could satisfy."""


@dataclass(frozen=True, slots=True)
class Planned:
    """Report with the inputs for predicting the duration of the publication and for searching for layouts."""

    report: PlanReport
    compiled: CompiledPublication | None
    """Compiled publication; None if the run has no engines or the compiler rejects it."""
    spec: ModelSpec
    machine: Machine
    problems: tuple[SlimxError, ...]
    """Errors whose messages are the report's violations."""

    @property
    def published(self) -> PublicationPlan | None:
        """Plan of the publication to one engine; None without a compiled publication."""
        if self.compiled is None:
            return None
        return self.compiled.published


def plan_report(config: Config, policies: Mapping[str, Policy] | None = None, *, first: int = 0) -> Planned:
    """Computes the layout, the memory and the compiled publication of one policy from the model's config.json.

    `policies`: all policies of the run, if `config` is the configuration of a policy other than `actor`; None: the
    policies in `config`. `first`: index of the policy's first GPU. Every reason why the run would be refused is in the
    report's `violations`. Raises SlimxError only if the model cannot be read, because nothing can be computed without
    it."""
    spec = configured_model(config)
    machine = machine_of(config.cluster)
    # The plan is for the machine of the run, not for this one.
    device = "cuda" if config.cluster.device == "auto" else config.cluster.device
    transport = choose_transport(config, device)
    config = transport.applied(config)
    facts = model_facts(config, spec) | {"device": device, "machine": machine}
    facts["policies"] = config.policies if policies is None else policies
    problems = broken(all_rules(), facts, before=config.facts)
    splits = not any(problem.code.startswith("layout.") for problem in problems)
    report = _model_report(config, spec, machine, device)
    if not splits or any(problem.code == "critic.split" for problem in problems):
        report = report.model_copy(update={"violations": tuple(map(str, problems)), "refits": not splits})
        return Planned(report, None, spec, machine, tuple(problems))
    sizes: Sizes = facts["sizes"]
    separate: Sizes | None = None
    if config.critic is not None and config.critic.placement == "own":
        separate = facts["critic_sizes"]
    places = rank_map(config.served, config.schedule, spec, sizes, separate, per_node=machine.per_node, first=first)
    lacking = 0 if machine.nodes is None else max(0, places.nodes - machine.nodes)
    compiled = None
    if not lacking:  # the plan of a run that exceeds its cluster may be huge
        try:
            compiled = compile_publication(config, spec, sizes, device, report.engines)
        except SlimxError as error:
            problems.append(error)
    merging = merging_memory(config, spec, sizes, compiled.packed if compiled is not None else None)
    figures = None
    packed = 0
    registered = 0
    if compiled is not None:
        figures = publication_figures(config.publish, transport, compiled, sizes, report.engines, merging.published)
        if device == "cuda":
            packed = figures.publisher_bytes
            if compiled.dealt is not None and compiled.on_gpus:
                packed, registered = 0, packed
            elif not compiled.on_gpus:
                packed = packed_on_gpu(compiled.packed, ranks=sizes.world)
    critic = None if config.critic is None else (facts["critic_spec"], facts["critic_sizes"])
    fields = _of_layout(config, spec, sizes, critic, device, machine, figures, packed, registered, merging, places)
    measured = {key: fields[key] for key in ("trainer_memory", "engine_memory", "phases", "host")}
    single = all(policy.shares is not None for policy in facts["policies"].values())
    later_problems = broken(_rules(single), facts | {"places": places} | measured, before=facts)
    problems += later_problems
    fields |= {
        "nodes_lacking": lacking,
        "trainer_memory": without_refused_offloads(fields["trainer_memory"], facts),
        "publication": figures,
        "links": publication_links(compiled, places, report.engines, machine, config.publish.transport),
        "violations": tuple(map(str, problems)),
        "refits": any(problem.code in OF_LAYOUT for problem in later_problems),
        "warnings": _warnings(config, spec, machine, device, fields, runs=not problems, single=single),
    }
    return Planned(report.model_copy(update=fields), compiled, spec, machine, tuple(problems))


def _rules(single: bool) -> tuple[Rule, ...]:
    """Returns the rules that the plan of one policy is checked against. `single`: True if it is the run's only trained
    policy; if not, the number of nodes is checked later, for all policies together
    (`slimx.extras.planner.plan.policy_sums`)."""
    rules = all_rules()
    if single:
        return rules
    return tuple(rule for rule in rules if rule is not has_nodes)


def _model_report(config: Config, spec: ModelSpec, machine: Machine, device: str) -> PlanReport:
    """Returns a report with the fields that do not depend on the trainer's layout."""
    shapes = spec.table.checkpoint_shapes()
    engines: list[PlannedGroup] = []
    frozen: list[PlannedGroup] = []
    for group in config.served.groups:
        planned = _group(group, engine_sizes(group))
        if group.frozen:
            frozen.append(planned)
        else:
            engines.append(planned)
    return PlanReport(
        model=config.model.path,
        architecture=spec.hf["architectures"][0],
        parameters=sum(math.prod(shape) for shape in shapes.values()),
        checkpoint_tensors=len(shapes),
        device=device,
        gpu=machine.gpu.name if machine.gpu else None,
        gpu_memory=machine.memory,
        host_bandwidth=machine.gpu.host if machine.gpu else None,
        engines=tuple(engines),
        frozen=tuple(frozen),
    )


def _warnings(
    config: Config,
    spec: ModelSpec,
    machine: Machine,
    device: str,
    fields: Mapping[str, Any],
    *,
    runs: bool,
    single: bool,
) -> tuple[str, ...]:
    """Returns warnings about a plan with the report fields `fields`. `runs`: True if the plan has no violations.
    `single`: True if this is the run's only trained policy."""
    warnings = [
        *machine_warnings(config.trainer, config.served, machine, spec),
        *start_warnings(config, spec, device),
    ]
    if runs and device == "cuda":
        warnings += margin_warnings(machine, fields["phases"])
        warnings += idle_warnings(config.schedule, config.trainer, config.served)
    warnings += crowded_warnings(config.served, fields["engine_memory"], fields["batch"].requests_in_flight)
    if runs and device == "cuda" and single:
        warnings += unused_warnings(config.served, config.cluster, fields["rank_map"])
    return tuple(warnings)


def _of_layout(
    config: Config,
    spec: ModelSpec,
    sizes: Sizes,
    critic: tuple[ModelSpec, Sizes] | None,
    device: str,
    machine: Machine,
    figures: PublicationFigures | None,
    packed: int,
    registered: int,
    merging: MergingBytes,
    places: RankMap,
) -> dict[str, Any]:
    """Returns the fields of the report that depend on the trainer's layout. `critic`: the critic's model and sizes;
    None if there is no critic. `packed`: bytes of buckets on a trainer's GPU during publications; `registered`: bytes
    of buckets that stay there."""
    trainers = trainer_memory(
        config,
        spec,
        sizes,
        device,
        publication=packed + merging.work,
        merging=merging.published + merging.exported,
        registered=registered,
    )
    critics: tuple[TrainerMemory, ...] = ()
    if critic is not None:
        critics = trainer_memory(config.as_critic(), *critic, device, model="critic")
    colocate = config.schedule.colocate
    engines = _engine_records(config, spec, machine, figures, trainers)
    separate_critic = bool(places.critic)
    phases = phase_memory(
        machine,
        trainers + critics,
        engines,
        separate_critic=separate_critic,
        colocate=colocate,
        offload=config.trainer.offload,
        apart={group.name for group in config.served.evaluation},
    )
    batch = batch_plan(config, sizes)
    host = host_memory(
        config,
        machine,
        trainers + critics,
        figures,
        separate_critic=separate_critic,
        batches=kept_batches(config, spec, batch),
        graphs=max((record.graphs for record in engines), default=0),
    )
    return {
        "trainer": sizes,
        "largest_rank": max(record.parameters for record in trainers),
        "critic": critic[1] if critic else None,
        "separate_critic": separate_critic,
        "critic_largest_rank": max((record.parameters for record in critics), default=0),
        "rank_map": places,
        "trainer_memory": trainers + critics,
        "engine_memory": engines,
        "colocated": colocated_memory(machine, phases, engines),
        "phases": phases,
        "host": host,
        "disk": disk_bytes(config, spec, critic[0] if critic else None, batch),
        "batch": batch,
        "rollout_load": rollout_load(config, spec),
    }


def _engine_records(
    config: Config,
    spec: ModelSpec,
    machine: Machine,
    figures: PublicationFigures | None,
    trainers: Sequence[TrainerMemory],
) -> tuple[EngineMemory, ...]:
    """Returns the memory of the engines that slimx starts for the policy, one record per group."""
    staged = 0
    registered = 0
    if figures is not None:
        staged = figures.staged_bytes
        registered = figures.registered_bytes
    occupied = 0
    if config.schedule.colocate:
        occupied = max(record.away for record in trainers)
    out = []
    for group in config.served.policy:
        if not group.borrowed:
            shared = 0 if group in config.served.evaluation else occupied
            out.append(
                engine_memory(config, spec, group, machine, staged=staged, registered=registered, occupied=shared)
            )
    return tuple(out)


def _group(group: Engines, sizes: EngineSizes) -> PlannedGroup:
    return PlannedGroup(
        name=group.name,
        count=group.servers,
        sizes=sizes,
        role=group.role,
        nodes=group.nodes,
        external=bool(group.urls),
        borrowed=group.borrowed,
    )
