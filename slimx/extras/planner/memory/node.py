"""Host memory of a node, and disk space of a run."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

from slimx.config.schema import Config
from slimx.config.sections.trainer import Trainer
from slimx.extras.planner.memory.phases import by_gpu, memory_parts
from slimx.extras.planner.memory.state import FP32
from slimx.extras.planner.memory.trainer import holdings
from slimx.extras.planner.memory_record import DiskBytes, HostMemory, TrainerMemory
from slimx.extras.planner.record import BatchPlan, PublicationFigures
from slimx.extras.recovery.section import Recovery
from slimx.layout.number_formats import ITEMSIZE
from slimx.layout.ranks import Sizes
from slimx.models.families import ModelSpec
from slimx.preflight.hardware import GIB, Machine

PROCESS = 4 * GIB
"""Assumed bytes of host memory that a trainer or engine process takes for libraries and CUDA, which are not counted
elsewhere."""
_TOKEN = 4 + 4 + 1
"""Bytes per token of a rollout: token id, log-prob and mask."""


def host_memory(
    config: Config,
    machine: Machine,
    trainers: Sequence[TrainerMemory],
    figures: PublicationFigures | None,
    *,
    separate_critic: bool,
    batches: int = 0,
    graphs: int = 0,
) -> HostMemory:
    """Returns the host memory that the fullest node with trainer ranks needs once every phase of a step has allocated
    its memory. Pinned memory counts in all phases, because it is kept for reuse.

    `figures`: figures of the publication; None without engines. `batches`: bytes of the batches that the driver, which
    may run on this node, keeps (`kept_batches`). `graphs`: bytes of an engine rank's CUDA graphs, which are in host
    memory while the engine sleeps."""
    policy_ranks, _ = by_gpu(trainers, separate_critic)
    rank = max(policy_ranks, key=lambda records: records[0].host)
    ranks = min(machine.per_node, config.trainer.world_size)
    engines = ranks if config.schedule.colocate else 0
    buckets = 0
    last = 0
    if figures is not None and not figures.on_gpus:
        buckets, last = _publication_bytes(config, figures, ranks)
    mirrored = 0
    if config.section(Recovery).mirror_every:
        mirrored = rank[0].host_checkpoint
    moments = 0
    copies = 0
    away = 0
    activations = 0
    chosen = 0
    checkpoint = 0
    for record in rank:
        moments += record.host_optimizer
        copies += record.host_copies
        away += record.host_away
        activations = max(activations, record.host_activations)  # the models alternate, so the largest counts
        chosen += record.host_chosen
        checkpoint += record.host_checkpoint
    sizes = {
        "moments": ranks * moments,
        "weights of reference and teacher": ranks * copies,
        "state that leaves GPUs": ranks * away,
        "activations that wait": ranks * activations,
        "tokens that indexers chose": ranks * chosen,
        "copies that checkpoints are written from": ranks * checkpoint,
        "copies that mirrors are sent from": ranks * mirrored,
        "mirrors of a neighbour's ranks": 2 * ranks * mirrored,  # one complete copy, and one being received
        "buckets of a publication": buckets,
        "weights published last": last,
        "CUDA graphs of sleeping engines": engines * graphs,
        "batches that are kept for new trainers": batches,
        "processes": (ranks + engines) * PROCESS,
    }
    return HostMemory(memory=machine.host_memory, ranks=ranks, parts=memory_parts(sizes))


def _publication_bytes(config: Config, figures: PublicationFigures, ranks: int) -> tuple[int, int]:
    """Returns the sizes in bytes of a publication's buckets, and of the weights published last, on a node with `ranks`
    trainer ranks."""
    servers = 0  # number of servers with ranks on the node
    if config.schedule.colocate:
        group = config.served.policy[0]
        servers = max(1, ranks // (group.ranks // group.nodes))
    buckets = figures.publisher_bytes
    last = 0
    if config.publish.transport == "disk":
        last = figures.kept_bytes + servers * (figures.received_bytes + figures.landing_bytes)
    if config.publish.transport == "nixl":
        # Every trainer rank and every server registers its memory.
        buckets = ranks * figures.publisher_bytes + servers * figures.landing_bytes
        last = ranks * figures.kept_bytes + servers * figures.received_bytes
    return buckets, last


def kept_batches(config: Config, spec: ModelSpec, batch: BatchPlan) -> int:
    """Returns the maximum size in bytes of the batches that the driver keeps for trainers that replace lost ones. The
    driver keeps the batches of all steps between two checkpoints and of as many subsequent steps, because training
    continues while the second checkpoint is being written."""
    if not config.section(Recovery).trainers:
        return 0
    step = batch.tokens_per_step * _TOKEN
    if spec.experts and config.route_stride:
        rollouts = ceil(batch.rollouts_per_step / config.route_stride)
        step += min(batch.tokens_per_step, rollouts * batch.tokens_per_rollout) * _routes(spec)
    return 2 * config.checkpoint.every * step


def _routes(spec: ModelSpec) -> int:
    """Returns the size in bytes of one token's routed-expert indices, over all layers."""
    itemsize = 1 if spec.experts <= 256 else 2
    return len(spec.moe_layers) * spec.transformer["moe_router_topk"] * itemsize


def disk_bytes(config: Config, spec: ModelSpec, critic: ModelSpec | None, batch: BatchPlan) -> DiskBytes:
    """Returns the maximum disk space for the run's directory, in bytes. `critic`: the critic's model; None without
    one."""
    options = config.checkpoint
    tracked = config.track.rollouts
    steps = config.schedule.steps
    checkpoint = _checkpoint_bytes(config, config.trainer, spec)
    if critic is not None:
        checkpoint += _checkpoint_bytes(config, config.as_critic().trainer, critic)
    checkpoints = options.keep + 1
    if options.keep_every:
        checkpoints += steps // options.keep_every
    exports = int(options.export_hf)
    if options.export_every:
        exports += steps // options.export_every
    if config.algorithm.reference_refresh:
        exports += min(options.keep + 1, steps // config.algorithm.reference_refresh)
    tracked_steps = 0
    if tracked.every and config.served.policy:
        tracked_steps = steps // tracked.every
        if tracked.keep:
            tracked_steps = min(tracked_steps, tracked.keep)
    token = _TOKEN
    if tracked.routes and spec.experts:
        token += _routes(spec)
    elements = sum(prod(shape) for shape in spec.table.checkpoint_shapes().values())
    return DiskBytes(
        checkpoint=checkpoint,
        checkpoints=checkpoints,
        export=elements * ITEMSIZE[config.numerics.dtype],
        exports=exports,
        rollouts=tracked_steps * batch.tokens_per_step * token,
    )


def _checkpoint_bytes(config: Config, trainer: Trainer, spec: ModelSpec) -> int:
    """Returns the size in bytes of one model in a checkpoint."""
    state = FP32 + 2 * ITEMSIZE[trainer.optimizer.moments_dtype]  # per element: main weight, moments
    nbytes = 0
    for run in holdings(trainer, config.numerics, spec).runs(Sizes(), 0):
        itemsize = ITEMSIZE[run.dtype]
        if run.trained:
            itemsize += state
        nbytes += run.elements * run.count * itemsize
    return nbytes
