"""`slimx plan`: what a run will do, from its configuration and the model's config.json alone.

    config.json --> layout, rank map --> memory of trainers and engines --> what does not fit
                            |
                            +--> publication, compiled and proven --> bytes per link

No weights, no prompts, no GPU: a run of hundreds of GPUs is checked and costed on a laptop. Everything is compiled with
the run's own functions, so that a plan which is printed is a plan that the run will follow.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slimx.config.rule import all_rules, broken
from slimx.config.schema import Config
from slimx.config.sections.engines import Engines
from slimx.config.sections.policies import Policy
from slimx.config.sections.publish import Publish
from slimx.engines.transport import transport_of
from slimx.errors import SlimxError
from slimx.extras.direct.dealing import copies_of, deal
from slimx.extras.direct.wire import wire_bytes
from slimx.extras.planner.batch_plan import batch_plan
from slimx.extras.planner.links.model import (
    Links,
    Traffic,
    direct_traffic,
    gb300_nvlink,
    h100_infiniband,
    predict,
    traffic_of,
)
from slimx.extras.planner.memory.engine import engine_memory
from slimx.extras.planner.memory.node import disk_bytes, host_memory, kept_batches
from slimx.extras.planner.memory.phases import colocated_memory, phase_memory
from slimx.extras.planner.memory.publication import (
    CONTEXT,
    MergingBytes,
    changes_memory,
    direct_memory,
    merging_memory,
    packed_on_gpu,
)
from slimx.extras.planner.memory.trainer import trainer_memory
from slimx.extras.planner.memory_record import TrainerMemory
from slimx.extras.planner.plan.keepings import told_parts
from slimx.extras.planner.plan.link_bytes import DealtPlan, direct_link_bytes, link_bytes
from slimx.extras.planner.plan.rank_map import rank_map
from slimx.extras.planner.record import PlannedGroup, PlanReport, Prediction, PublicationFigures, RankMap
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
from slimx.preflight.transport import ChosenTransport, choose_transport
from slimx.reshard.plan.copy_plan import Plan
from slimx.reshard.plan.publication import PublicationPlan, publication_plan

OF_LAYOUT = ("memory.trainer", "memory.colocated", "memory.host")
"""Rules that another layout of the trainer could satisfy."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A report, and what more can be asked of it: predictions of a publication (None: no engines, or refused), other
    layouts."""

    report: PlanReport
    published: PublicationPlan | None
    spec: ModelSpec
    machine: Machine
    problems: tuple[SlimxError, ...]
    """The report's violations, with codes."""


def plan_report(config: Config, policies: Mapping[str, Policy] | None = None, *, first: int = 0) -> Planned:
    """Read the model's config.json, split it as configured, weigh it and compile the publication. `policies`: of the
    run that the policy of `config` belongs to, where it is a further one. `first`: its first GPU.

    Whatever would refuse the run stands in the report's `violations`. Raises SlimxError only for a model that cannot be
    read, without which nothing can be said."""
    spec = configured_model(config)
    machine = machine_of(config.cluster)
    # A plan is for the machine of the run, which this one need not be.
    device = "cuda" if config.cluster.device == "auto" else config.cluster.device
    transport = choose_transport(config, device)
    config = transport.applied(config)
    facts = model_facts(config, spec) | {"device": device, "machine": machine}
    facts["policies"] = config.policies if policies is None else policies
    problems = broken(all_rules(), facts, before=config.sections)
    sizes, critic = facts["sizes"], facts["critic_sizes"]
    split = not any(problem.code.startswith("layout.") for problem in problems)
    groups = [(group, engine_sizes(group)) for group in config.rollout.served]
    report = PlanReport(
        model=config.model.path,
        architecture=spec.hf["architectures"][0],
        parameters=sum(math.prod(shape) for shape in spec.table.checkpoint_shapes().values()),
        checkpoint_tensors=len(spec.table.checkpoint_shapes()),
        device=device,
        gpu=machine.gpu.name if machine.gpu else None,
        gpu_memory=machine.memory,
        host_bandwidth=machine.gpu.host if machine.gpu else None,
        engines=tuple(_group(group, own) for group, own in groups if not group.frozen),
        frozen=tuple(_group(group, own) for group, own in groups if group.frozen),
    )
    if not split or any(problem.code == "critic.split" for problem in problems):
        report = report.model_copy(update={"violations": tuple(map(str, problems)), "refits": not split})
        return Planned(report, None, spec, machine, tuple(problems))
    apart = critic if critic is not None and config.critic.placement == "own" else None
    places = rank_map(config.rollout, config.schedule, spec, sizes, apart, per_node=machine.per_node, first=first)
    published, direct, seconds = None, None, 0.0
    on_gpus = transport_of(config.publish).on_gpus(config.publish, device, colocate=config.schedule.colocate)
    # The moves of a run that its cluster has no room for may exceed any memory.
    lacking = max(0, places.nodes - machine.nodes) if machine.nodes is not None else 0
    if not lacking:
        began = time.perf_counter()
        try:
            published = publication_plan(config, spec, sizes, device)
            seconds = time.perf_counter() - began
            if published is not None and config.publish.transport == "nixl":
                direct = _dealt(published.plan, report.engines, on_gpus=on_gpus)
        except SlimxError as error:
            published = None
            problems.append(error)
    figures, packed = None, 0
    packs = published and (direct.plan if direct is not None else published.plan)
    merging = merging_memory(config, spec, sizes, packs)
    if published is not None:
        of = (config.publish, transport, published, sizes, report.engines, seconds, direct, on_gpus)
        figures = _figures(*of, merging.published)
        if device == "cuda":
            packed = figures.publisher_bytes if on_gpus else packed_on_gpu(packs, ranks=sizes.world)
    own = None if critic is None else (facts["critic_spec"], critic)
    known = _of_layout(config, spec, sizes, own, device, machine, figures, packed, merging, places)
    weighed = ("trainer_memory", "engine_memory", "phases", "host")
    placed = facts | {"places": places} | {key: known[key] for key in weighed}
    alone = all(policy.shares is not None for policy in facts["policies"].values())
    rules = all_rules() if alone else [rule for rule in all_rules() if rule is not has_nodes]
    # The nodes of several policies are counted over all of them (slimx.extras.planner.plan.together).
    told = broken(rules, placed, before=facts)
    links = ()
    if direct is not None:
        links = direct_link_bytes(direct, places, machine, on_gpus=on_gpus)
    elif published is not None:
        links = link_bytes(published.plan, places, report.engines, machine, config.publish.transport)
    runs = device == "cuda" and not problems and not told
    update = {
        **known,
        "nodes_lacking": lacking,
        "trainer_memory": told_parts(known["trainer_memory"], facts),
        "publication": figures,
        "links": links,
        "violations": tuple(map(str, problems + told)),
        "refits": any(problem.code in OF_LAYOUT for problem in told),
        "warnings": (
            *machine_warnings(config.trainer, config.rollout, machine, spec),
            *start_warnings(config, spec, device),
            *(margin_warnings(machine, known["phases"]) if runs else ()),
            *(idle_warnings(config.schedule, config.trainer, config.rollout) if runs else ()),
            *crowded_warnings(config.rollout, known["engine_memory"], known["batch"].requests_in_flight),
            *(unused_warnings(config.rollout, config.cluster, places) if runs and alone else ()),
        ),
    }
    return Planned(report.model_copy(update=update), published, spec, machine, tuple(problems + told))


def _of_layout(
    config: Config,
    spec: ModelSpec,
    sizes: Sizes,
    critic: tuple[ModelSpec, Sizes] | None,
    device: str,
    machine: Machine,
    figures: PublicationFigures | None,
    packed: int,
    merging: MergingBytes,
    places: RankMap,
) -> dict[str, Any]:
    """Returns the report's fields that follow from the layout. `packed`: bytes of buckets on a trainer's GPU."""
    room, leaving = merging.published + merging.exported, packed + merging.work
    trainers = trainer_memory(config, spec, sizes, device, publication=leaving, merging=room)
    critics: tuple[TrainerMemory, ...] = ()
    if critic is not None:
        critics = trainer_memory(config.as_critic(), *critic, device, model="critic")
    staged = figures.staged_bytes if figures else 0
    shared = config.schedule.colocate
    beside = max(record.away for record in trainers) if shared else 0
    engines = tuple(
        engine_memory(config, spec, group, machine, staged=staged, beside=beside)
        for group in config.rollout.policy_engines
        if not group.borrowed
    )
    critic_own = bool(places.critic)
    phases = phase_memory(
        machine,
        trainers + critics,
        engines,
        critic_own=critic_own,
        colocate=shared,
        offload=config.trainer.offload,
    )
    batch = batch_plan(config, sizes)
    return {
        "trainer": sizes,
        "largest_rank": max(record.parameters for record in trainers),
        "critic": critic[1] if critic else None,
        "critic_own": critic_own,
        "critic_largest_rank": max((record.parameters for record in critics), default=0),
        "rank_map": places,
        "trainer_memory": trainers + critics,
        "engine_memory": engines,
        "colocated": colocated_memory(machine, phases, engines),
        "phases": phases,
        "host": host_memory(
            config,
            machine,
            trainers + critics,
            figures,
            critic_own=critic_own,
            batches=kept_batches(config, spec, batch),
            graphs=max((record.graphs for record in engines), default=0),
        ),
        "disk": disk_bytes(config, spec, critic[0] if critic else None, batch),
        "batch": batch,
    }


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


def _dealt(plan: Plan, groups: tuple[PlannedGroup, ...], *, on_gpus: bool) -> DealtPlan:
    """`plan` dealt out for all engines of a run, as `slimx.orchestration.publications` has it done."""
    each = [plan.targets if on_gpus and plan.targets > 1 else group.nodes for group in groups]
    receivers = [count for group, count in zip(groups, each, strict=True) for _ in range(group.count)]
    copies, edges = copies_of(plan, receivers)
    return DealtPlan(deal(plan, engines=copies), receivers, edges)


def _traffic(published: PublicationPlan, sizes: Sizes, groups: tuple[PlannedGroup, ...]) -> Traffic:
    """Groups may differ in size where they take Hugging Face names: every rank of every engine is counted."""
    if published.encoding == "local":
        return direct_traffic(published.plan, sources=sizes.world, engines=sum(group.count for group in groups))
    traffic = traffic_of(
        published.plan,
        sources=sizes.world,
        engines=sum(group.count for group in groups),
        engine_ranks=groups[0].sizes.world,
        encoding=published.encoding,
    )
    return replace(traffic, engine_ranks=sum(group.count * group.sizes.world for group in groups))


def _figures(
    publish: Publish,
    transport: ChosenTransport,
    published: PublicationPlan,
    sizes: Sizes,
    groups: tuple[PlannedGroup, ...],
    seconds: float,
    direct: DealtPlan | None,
    on_gpus: bool,
    merging: int,
) -> PublicationFigures:
    """`merging`: bytes in which a trainer rank merges the weights of a bucket."""
    plan = published.plan
    tensors = [tensor for target in plan.buckets for bucket in target for tensor in bucket.tensors]
    wire = wire_bytes(plan)
    sent = wire.sent(sizes.world) * sum(group.count for group in groups)
    if direct is not None:
        sent = wire_bytes(direct.plan).sent(sizes.world)
    received = wire.received(plan.targets)
    copies = sum(group.count * group.sizes.world for group in groups) // plan.targets
    publisher_bytes, staged_bytes = _memory(publish, plan, sizes.world, int(received.max()))
    landing = kept = held = 0
    if direct is not None:  # the same buckets, at each engine instead of beside trainer rank 0
        taken = direct_memory(direct.plan, ranks=sizes.world, edges=direct.edges, delta=publish.delta is not None)
        if on_gpus:  # a bucket is made of what came, and the server stages a copy of it
            staged_bytes = CONTEXT + taken.landing + 2 * max(b.size for target in plan.buckets for b in target)
        else:
            split = 1 if plan.targets == 1 else min(group.nodes for group in groups)
            landing = taken.landing + publisher_bytes // split
        publisher_bytes, kept, held = taken.ring, taken.kept, taken.held
    elif publish.transport == "disk" and publish.changes:
        kept, held = changes_memory(plan)
        landing = held if publish.staging == "model" else publisher_bytes
    alone = 0
    if published.adapters is not None:
        alone = int(wire_bytes(published.adapters).received(1).sum())
        publisher_bytes += _memory(publish, published.adapters, sizes.world, alone)[0]
    return PublicationFigures(
        encoding=published.encoding,
        note=published.note,
        rule=publish.quantise or "none",
        tensors=len(tensors),
        quantised=sum(tensor.scale_of >= 0 for tensor in tensors),
        buckets=plan.count,
        moves=len(plan.moved),
        launches=plan.launches,
        nbytes=int(received.sum()) * copies,
        adapter_bytes=alone * copies,
        received=int(received.max()),
        sent_max=int(sent.max()),
        sent_mean=float(sent.mean()),
        transport=transport.name,
        transport_note=transport.why,
        on_gpus=on_gpus,
        publisher_bytes=publisher_bytes,
        landing_bytes=landing,
        merging_bytes=merging,
        kept_bytes=kept,
        held_bytes=held,
        staged_bytes=staged_bytes,
        plan_bytes=len(plan.to_bytes()),
        compile_seconds=seconds,
    )


def _memory(publish: Publish, plan: Plan, ranks: int, received: int) -> tuple[int, int]:
    """`publisher_bytes` and `staged_bytes` of PublicationFigures; `ranks`: of the trainer."""
    whole = [sum(target[number].size for target in plan.buckets) for number in range(plan.count)]
    part = max(bucket.size for target in plan.buckets for bucket in target)
    two = 2 * max(whole)
    if not publish.on_device:
        given_back = publish.staging == "bucket" or publish.transport == "disk"
        return (min(two, sum(whole)) if given_back else sum(whole)), 0
    staged = received if publish.staging == "model" else part
    # The ranks share a bucket's parts, and each has room for the largest.
    return min(2, plan.count) * math.ceil(plan.targets / ranks) * part, staged


def predictions(planned: Planned) -> tuple[Prediction, ...]:
    """The publication on every cluster that the link model knows."""
    traffic = _traffic(planned.published, planned.report.trainer, planned.report.engines)
    return tuple(_prediction(traffic, links) for links in (h100_infiniband(), gb300_nvlink()))


def _prediction(traffic: Traffic, links: Links) -> Prediction:
    try:
        return Prediction(links=links.name, stages=predict(traffic, links))
    except SlimxError as error:
        return Prediction(links=links.name, stages=None, refusal=str(error))
