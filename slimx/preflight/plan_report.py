"""`slimx plan`: what a run will do, from its configuration and the model's config.json alone.

No weights, no prompts, no GPU: a run of hundreds of GPUs is checked and costed on a laptop. Everything is compiled with
the run's own functions, so that a plan which is printed is a plan that the run will follow.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from slimx.config.schema import Config
from slimx.errors import SlimxError
from slimx.layout.megatron import MegatronLayout
from slimx.layout.ranks import EngineSizes, Sizes
from slimx.models.families import ModelSpec, read_model
from slimx.preflight.layout import check_critic_layout, check_layout
from slimx.preflight.link_model import Links, Stages, Traffic, Trial, gb300_nvlink, h100_infiniband, predict, traffic_of
from slimx.preflight.publication import PublicationPlan, engine_sizes, publication_plan
from slimx.preflight.routing import check_routing
from slimx.reshard.manifest import Encoding
from slimx.reshard.plan import Plan


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """One group of `rollout.engines`."""

    name: str
    count: int
    sizes: EngineSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationFigures:
    """One publication to all engines, as compiled. Coverage is proven: compiling refuses what it cannot prove."""

    encoding: Encoding
    note: str
    """Why this encoding."""
    rule: str
    """How values are quantised; "none" where they are not."""
    tensors: int
    """Sent to one engine, block scales counted."""
    quantised: int
    """Of these, tensors of quantised values."""
    buckets: int
    moves: int
    """Rectangles that go from one trainer rank's tensor to one engine rank's."""
    launches: int
    """Kernel launches of the trainer rank that has most of them."""
    nbytes: int
    """Bytes of values and scales to all engines together."""
    received: int
    """Bytes that the engine rank with most of them takes."""
    sent_max: int
    """Bytes that the trainer rank with most of them sends."""
    sent_mean: float
    transport: str
    publisher_bytes: int
    """Memory for buckets beside trainer rank 0's own: its GPU's with `cuda_ipc` and `nccl`, else the host's."""
    staged_bytes: int
    """GPU memory that the engine rank with most of it needs beside its weights, in a publication."""
    plan_bytes: int
    """Size of the serialised plan, which every trainer rank keeps."""
    compile_seconds: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of a publication on links that were not measured."""

    links: str
    stages: Stages | None
    refusal: str = ""
    """Why there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """Everything that `slimx plan` says."""

    model: str
    architecture: str
    parameters: int
    """Elements that the trainer holds, each counted once."""
    checkpoint_tensors: int
    trainer: Sizes
    largest_rank: int
    """Elements of the parameters on the trainer rank that holds most of them."""
    device: str
    critic: Sizes | None
    """PPO's critic; None: there is none."""
    critic_own: bool
    """Whether it has ranks of its own beside the trainer's."""
    critic_largest_rank: int
    """As `largest_rank`, of the critic."""
    engines: tuple[EngineGroup, ...]
    publication: PublicationFigures | None
    """None for a run without engines."""
    traffic: Traffic | None

    def to_json(self, predictions: tuple[Prediction, ...] = (), trial: Trial | None = None) -> dict[str, Any]:
        """The report as JSON values; without `traffic`, which is arrays by rank and bucket."""
        out = asdict(self)
        out.pop("traffic")
        if trial is not None:
            shown = [asdict(prediction) for prediction in predictions] if trial.holds else None
            out["predicted"] = {"model_off_here": trial.off, "shown": trial.holds, "publications": shown}
        return out


def plan_report(config: Config) -> PlanReport:
    """Read the model's config.json, split it as configured and compile the publication.

    Raises SlimxError for whatever would refuse the run at that stage."""
    spec = read_model(config.model.path, mtp_layers=config.trainer.megatron.get("mtp_num_layers") or 0)
    sizes = check_layout(config, spec)
    check_routing(config, spec)
    trunk, critic = check_critic_layout(config) if config.critic is not None else (None, None)
    # A plan is for the machine of the run, which this one need not be.
    device = "cuda" if config.cluster.device == "auto" else config.cluster.device
    began = time.perf_counter()
    published = publication_plan(config, spec, sizes, device)
    seconds = time.perf_counter() - began
    groups = tuple(EngineGroup(group.name, group.count, engine_sizes(group)) for group in config.rollout.engines)
    traffic = _traffic(published, sizes, groups) if published else None
    return PlanReport(
        model=config.model.path,
        architecture=spec.hf["architectures"][0],
        parameters=sum(math.prod(shape) for shape in spec.table.checkpoint().values()),
        checkpoint_tensors=len(spec.table.checkpoint()),
        trainer=sizes,
        largest_rank=_largest_rank(spec, sizes),
        device=device,
        critic=critic,
        critic_own=config.critic is not None and config.critic.placement == "own",
        critic_largest_rank=_largest_rank(trunk, critic) if trunk is not None and critic is not None else 0,
        engines=groups,
        publication=_figures(config, published, traffic, seconds) if published else None,
        traffic=traffic,
    )


def _traffic(published: PublicationPlan, sizes: Sizes, groups: tuple[EngineGroup, ...]) -> Traffic:
    """Groups may differ in size where they take Hugging Face names: every rank of every engine is counted."""
    traffic = traffic_of(
        published.plan,
        sources=sizes.world,
        engines=sum(group.count for group in groups),
        engine_ranks=groups[0].sizes.world,
        encoding=published.encoding,
    )
    return replace(traffic, engine_ranks=sum(group.count * group.sizes.world for group in groups))


def _largest_rank(spec: ModelSpec, sizes: Sizes) -> int:
    held = np.zeros(sizes.world, dtype=np.int64)
    for part in MegatronLayout(spec.table, sizes).parts():
        held[list(part.ranks)] += math.prod(part.shape)
    return int(held.max())


def _figures(config: Config, published: PublicationPlan, traffic: Traffic, seconds: float) -> PublicationFigures:
    plan = published.plan
    tensors = [tensor for target in plan.buckets for bucket in target for tensor in bucket.tensors]
    sent = traffic.sent.sum(axis=0)
    received = traffic.received.sum(axis=0)
    copies = traffic.engine_ranks // plan.targets
    publisher_bytes, staged_bytes = _memory(config, plan, int(received.max()))
    return PublicationFigures(
        encoding=published.encoding,
        note=published.note,
        rule=config.publish.quantise or "none",
        tensors=len(tensors),
        quantised=sum(tensor.scale_of >= 0 for tensor in tensors),
        buckets=plan.count,
        moves=len(plan.moved),
        launches=plan.launches,
        nbytes=int(received.sum()) * copies,
        received=int(received.max()),
        sent_max=int(sent.max()),
        sent_mean=float(sent.mean()),
        transport=config.publish.transport,
        publisher_bytes=publisher_bytes,
        staged_bytes=staged_bytes,
        plan_bytes=len(plan.to_bytes()),
        compile_seconds=seconds,
    )


def _memory(config: Config, plan: Plan, received: int) -> tuple[int, int]:
    """`publisher_bytes` and `staged_bytes` of PublicationFigures."""
    whole = [sum(target[number].size for target in plan.buckets) for number in range(plan.count)]
    part = max(bucket.size for target in plan.buckets for bucket in target)
    options, two = config.publish, 2 * max(whole)
    if not options.on_device:
        given_back = options.staging == "bucket" or options.transport == "disk"
        return (min(two, sum(whole)) if given_back else sum(whole)), 0
    staged = received if options.staging == "model" else part
    return min(two, sum(whole)), staged + (max(whole) if options.transport == "nccl" else 0)


def predictions(traffic: Traffic) -> tuple[Prediction, ...]:
    """The publication on every cluster that the link model knows."""
    return tuple(_prediction(traffic, links) for links in (h100_infiniband(), gb300_nvlink()))


def _prediction(traffic: Traffic, links: Links) -> Prediction:
    try:
        return Prediction(links.name, predict(traffic, links))
    except SlimxError as error:
        return Prediction(links.name, None, str(error))


def describe(report: PlanReport) -> list[str]:
    """The report as lines of text."""
    lines = [
        f"model       {report.architecture}, {report.model}: {_count(report.parameters, 1)} parameters in "
        f"{report.checkpoint_tensors:,} tensors",
        f"trainer     {report.trainer.world} ranks: {_trainer(report.trainer)}; the fullest holds "
        f"{_count(report.largest_rank, 2)} parameters",
    ]
    if report.critic is not None:
        where = f"{report.critic.world} ranks of its own" if report.critic_own else "in the trainer's ranks"
        lines.append(
            f"critic      {where}: {_trainer(report.critic)}; the fullest holds "
            f"{_count(report.critic_largest_rank, 2)} more parameters"
        )
    for group in report.engines:
        lines.append(f"engines     {group.name}: {group.count} x {group.sizes.world} ranks: {_engine(group.sizes)}")
    if (figures := report.publication) is None:
        return [*lines, "publication none: the run has no engines"]
    return [*lines, *_publication(figures, report.device)]


def _publication(figures: PublicationFigures, device: str) -> Iterator[str]:
    yield f"publication encoding {figures.encoding}: {figures.note} (engines on {device})"
    quantised = f"{figures.quantised:,} quantised to fp8 by the rule {figures.rule}" if figures.quantised else "none"
    yield f"  tensors   {figures.tensors:,} to each engine, quantised: {quantised}"
    yield (
        f"  bytes     {_size(figures.nbytes)} in all; an engine rank takes {_size(figures.received)}, a trainer rank "
        f"sends {_size(figures.sent_max)} at most, {_size(figures.sent_mean)} on average"
    )
    yield f"  work      {figures.buckets:,} buckets, {figures.launches:,} kernel launches per trainer rank at most"
    yield (
        f"  memory    {_size(figures.publisher_bytes)} for buckets beside trainer rank 0, "
        f"{_size(figures.staged_bytes)} of an engine rank's GPU at most (publish.transport {figures.transport})"
    )
    yield (
        f"  plan      {figures.moves:,} moves, {_size(figures.plan_bytes)}, compiled in "
        f"{figures.compile_seconds:.1f} s; "
        "proven: every element of every tensor is written once"
    )


def describe_predictions(found: tuple[Prediction, ...], trial: Trial) -> list[str]:
    """The predictions as lines of text, if the model is right about this machine."""
    if not trial.holds:
        return [f"predicted   not shown: {trial}"]
    lines = [f"predicted   by the link model, not measured; {trial}"]
    for one in found:
        lines.append(f"  {one.links}: {_stages(one.stages) if one.stages else one.refusal}")
    return [*lines, "  if each trainer rank sends each engine rank its own bytes, from device to device"]


def _stages(stages: Stages) -> str:
    return (
        f"{stages.total:.2f} s (gather and pack {stages.pack:.2f}, transfer {stages.transfer:.2f}, verify "
        f"{stages.check + stages.verify:.2f}, load {stages.load:.2f}, calls {stages.control:.2f}; packing overlaps "
        "with transfer)"
    )


def _trainer(sizes: Sizes) -> str:
    return (
        f"tensor {sizes.tensor} x pipeline {sizes.pipeline} x data {sizes.data}, expert {sizes.expert} x expert tensor "
        f"{sizes.expert_tensor}"
    )


def _engine(sizes: EngineSizes) -> str:
    dp = f", attention in {sizes.attention_data} copies" if sizes.attention_data > 1 else ""
    redundant = f", {sizes.redundant} redundant experts" if sizes.redundant else ""
    return f"tensor {sizes.tensor} x pipeline {sizes.pipeline}, expert {sizes.expert}{dp}{redundant}"


def _count(number: int, digits: int) -> str:
    return f"{number / 1e9:.{digits}f} B" if number >= 1e8 else f"{number / 1e6:.{digits}f} M"


def _size(nbytes: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} bytes"
