"""The publication in a plan: compiled as in a run, with its figures, its bytes per kind of link, and predictions of its
duration."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import NamedTuple

from slimx.config.schema import Config
from slimx.config.sections.publish import Publish
from slimx.engines.transport import transport_of
from slimx.errors import SlimxError
from slimx.extras.direct.dealing import spread_of
from slimx.extras.direct.transport import staggers
from slimx.extras.direct.wire import wire_bytes
from slimx.extras.planner.links.model import (
    Links,
    Traffic,
    direct_traffic,
    gb300_nvlink,
    h100_infiniband,
    predict,
    traffic_of,
)
from slimx.extras.planner.memory.publication import CONTEXT, changes_memory, direct_memory
from slimx.extras.planner.plan.link_bytes import DealtPlan, direct_link_bytes, link_bytes
from slimx.extras.planner.record import LinkBytes, PlannedGroup, Prediction, PublicationFigures, RankMap
from slimx.layout.ranks import Sizes
from slimx.models.families import ModelSpec
from slimx.preflight.hardware import Machine
from slimx.preflight.transport import ChosenTransport
from slimx.reshard.plan.copy_plan import Plan
from slimx.reshard.plan.publication import PublicationPlan, publication_plan


@dataclass(frozen=True, slots=True)
class CompiledPublication:
    """Compiled publication, with the facts about it that the report needs."""

    published: PublicationPlan
    dealt: DealtPlan | None
    """Plan divided among trainer ranks for all engines (nixl); None for other transports."""
    on_gpus: bool
    """True if buckets are in GPU memory instead of host memory."""
    seconds: float
    """Duration of the compilation in seconds."""

    @property
    def packed(self) -> Plan:
        """Plan by which trainer ranks pack their buckets. With nixl, this is the plan divided among trainer ranks
        (`dealt`); otherwise it is the published plan."""
        if self.dealt is None:
            return self.published.plan
        return self.dealt.plan


def compile_publication(
    config: Config, spec: ModelSpec, sizes: Sizes, device: str, groups: tuple[PlannedGroup, ...]
) -> CompiledPublication | None:
    """Compiles the publication of a run; returns None if the run has no engines that receive one."""
    on_gpus = transport_of(config.publish).on_gpus(config.publish, device, colocate=config.schedule.colocate)
    began = time.perf_counter()
    published = publication_plan(config, spec, sizes, device)
    seconds = time.perf_counter() - began
    if published is None:
        return None
    dealt = None
    if config.publish.transport == "nixl":
        dealt = _dealt(published.plan, groups, on_gpus=on_gpus, staggered=staggers(config))
    return CompiledPublication(published, dealt, on_gpus, seconds)


def publication_links(
    compiled: CompiledPublication | None,
    places: RankMap,
    groups: tuple[PlannedGroup, ...],
    machine: Machine,
    transport: str,
) -> tuple[LinkBytes, ...]:
    if compiled is None:
        return ()
    if compiled.dealt is not None:
        return direct_link_bytes(compiled.dealt, places, machine, on_gpus=compiled.on_gpus)
    return link_bytes(compiled.published.plan, places, groups, machine, transport)


def _dealt(plan: Plan, groups: tuple[PlannedGroup, ...], *, on_gpus: bool, staggered: bool) -> DealtPlan:
    """Returns `plan` divided among trainer ranks for all engines of a run, as `slimx.orchestration.publications`
    does."""
    receivers: list[int] = []
    for group in groups:
        per_engine = plan.targets if on_gpus and plan.targets > 1 else group.nodes
        receivers += [per_engine] * group.count
    spread = spread_of(plan, receivers, staggered=staggered)
    return DealtPlan(spread.deal(plan), receivers, spread.edges)


def _traffic(compiled: CompiledPublication, sizes: Sizes, groups: tuple[PlannedGroup, ...]) -> Traffic:
    """Returns the traffic of a publication to all engines: its numbers of bytes and messages. If weights are sent with
    Hugging Face names, engine groups may differ in size, so ranks are summed over all engines."""
    published = compiled.published
    engines = sum(group.count for group in groups)
    engine_ranks = sum(group.count * group.sizes.world for group in groups)
    if compiled.dealt is not None:
        traffic = direct_traffic(compiled.dealt.plan, sources=sizes.world)
        traffic = replace(traffic, readers=max(1, engine_ranks // compiled.dealt.plan.targets))
    elif published.encoding == "local":
        dealt = spread_of(published.plan, [1] * engines, staggered=True).deal(published.plan)
        return direct_traffic(dealt, sources=sizes.world)
    else:
        traffic = traffic_of(
            published.plan,
            sources=sizes.world,
            engines=engines,
            engine_ranks=groups[0].sizes.world,
            encoding=published.encoding,
        )
    return replace(traffic, engine_ranks=engine_ranks)


def publication_figures(
    publish: Publish,
    transport: ChosenTransport,
    compiled: CompiledPublication,
    sizes: Sizes,
    groups: tuple[PlannedGroup, ...],
    merging: int,
) -> PublicationFigures:
    """Returns the figures of the compiled publication. `merging`: bytes that a trainer rank needs to merge the weights
    of a bucket with adapters."""
    published = compiled.published
    plan = published.plan
    tensors = 0
    quantized = 0
    for target in plan.buckets:
        for bucket in target:
            tensors += len(bucket.tensors)
            quantized += sum(tensor.scale_of >= 0 for tensor in bucket.tensors)
    wire = wire_bytes(plan)
    if compiled.dealt is not None:
        sent = wire_bytes(compiled.dealt.plan).sent(sizes.world)
    else:
        sent = wire.sent(sizes.world) * sum(group.count for group in groups)
    received = wire.received(plan.targets)
    copies = sum(group.count * group.sizes.world for group in groups) // plan.targets
    memory = _publication_memory(publish, compiled, sizes, groups, int(received.max()))
    adapter_bytes = 0
    adapter_buckets = 0
    if published.adapters is not None:
        adapter_bytes = int(wire_bytes(published.adapters).received(1).sum())
        adapter_buckets, _ = _bucket_memory(publish, published.adapters, sizes.world, adapter_bytes)
    return PublicationFigures(
        encoding=published.encoding,
        note=published.note,
        rule=publish.quantize or "none",
        tensors=tensors,
        quantized=quantized,
        buckets=plan.count,
        moves=len(plan.moved),
        launches=plan.launches,
        nbytes=int(received.sum()) * copies,
        adapter_bytes=adapter_bytes * copies,
        received=int(received.max()),
        sent_max=int(sent.max()),
        sent_mean=float(sent.mean()),
        transport=transport.name,
        transport_note=transport.why,
        on_gpus=compiled.on_gpus,
        publisher_bytes=memory.publisher + adapter_buckets,
        landing_bytes=memory.landing,
        merging_bytes=merging,
        kept_bytes=memory.kept,
        received_bytes=memory.received,
        staged_bytes=memory.staged,
        registered_bytes=memory.registered,
        plan_bytes=len(plan.to_bytes()),
        compile_seconds=compiled.seconds,
    )


class _PublicationMemory(NamedTuple):
    """Memory that a publication needs, in bytes. Each field corresponds to the field of PublicationFigures that has the
    same name with the suffix `_bytes`."""

    publisher: int
    staged: int
    landing: int = 0
    kept: int = 0
    received: int = 0
    registered: int = 0


def _publication_memory(
    publish: Publish, compiled: CompiledPublication, sizes: Sizes, groups: tuple[PlannedGroup, ...], received: int
) -> _PublicationMemory:
    """Returns the memory needed for a publication without adapters. `received`: maximum number of bytes that an engine
    rank receives."""
    plan = compiled.published.plan
    buckets, staged = _bucket_memory(publish, plan, sizes.world, received)
    if compiled.dealt is not None:  # the buckets are at each engine instead of at trainer rank 0
        dealt = compiled.dealt
        direct = direct_memory(dealt.plan, ranks=sizes.world, edges=dealt.edges, delta=publish.delta is not None)
        if compiled.on_gpus:  # a bucket is assembled from received bytes, and the server stages a copy of it
            part = _largest_part(plan)
            registered = CONTEXT + direct.landing + part
            return _PublicationMemory(direct.ring, part, registered=registered)
        machines = 1
        if plan.targets > 1:
            machines = min(group.nodes for group in groups)
        landing = direct.landing + buckets // machines
        return _PublicationMemory(direct.ring, staged, landing, direct.kept, direct.received)
    if publish.transport == "disk" and publish.changes:
        kept, received_last = changes_memory(plan)
        landing = received_last if publish.staging == "model" else buckets
        return _PublicationMemory(buckets, staged, landing, kept, received_last)
    return _PublicationMemory(buckets, staged)


def _bucket_memory(publish: Publish, plan: Plan, ranks: int, received: int) -> tuple[int, int]:
    """Returns `publisher_bytes` and `staged_bytes` of PublicationFigures for `ranks` trainer ranks. `received`: maximum
    number of bytes that an engine rank receives."""
    if not publish.on_device:
        buckets = []
        for index in range(plan.count):
            buckets.append(sum(target[index].size for target in plan.buckets))
        nbytes = sum(buckets)
        if publish.staging == "bucket" or publish.transport == "disk":  # buckets are reused
            nbytes = min(2 * max(buckets), nbytes)
        return nbytes, 0
    part = _largest_part(plan)
    staged = received if publish.staging == "model" else part
    # The parts of a bucket are divided among the ranks, and each has memory for the largest part.
    return min(2, plan.count) * math.ceil(plan.targets / ranks) * part, staged


def _largest_part(plan: Plan) -> int:
    """Returns the size in bytes of the largest part of any bucket for a single target rank."""
    largest = 0
    for target in plan.buckets:
        for bucket in target:
            largest = max(largest, bucket.size)
    return largest


def predictions(
    compiled: CompiledPublication, publish: Publish, sizes: Sizes, groups: tuple[PlannedGroup, ...], loaded: int
) -> tuple[Prediction, ...]:
    """Returns the predicted duration of the publication on every cluster that the link model describes, from GPU to
    GPU. `loaded`: bytes of weights on the fullest engine rank."""
    traffic = replace(_traffic(compiled, sizes, groups), loaded=loaded)
    return tuple(_prediction(traffic, links, publish) for links in (h100_infiniband(), gb300_nvlink()))


def _prediction(traffic: Traffic, links: Links, publish: Publish) -> Prediction:
    # With nixl, a receiver assembles the bucket from the ranks' bytes, and the server copies it.
    copies = {"nixl": 2, "cuda_ipc": 1}.get(publish.transport, 0)
    try:
        stages = predict(traffic, links, by_bucket=publish.staging == "bucket", copies=copies)
        return Prediction(links=links.name, stages=stages)
    except SlimxError as error:
        return Prediction(links=links.name, stages=None, refusal=str(error))
