"""Host memory of a node, and what a run leaves on disk."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

from slimx.config.schema import Config
from slimx.extras.planner.memory.phases import by_gpu
from slimx.extras.planner.memory.state import FP32
from slimx.extras.planner.memory.trainer import holdings
from slimx.extras.planner.memory_record import DiskBytes, Held, HostMemory, TrainerMemory
from slimx.extras.planner.record import BatchPlan, PublicationFigures
from slimx.layout.number_formats import ITEMSIZE
from slimx.layout.ranks import Sizes
from slimx.models.families import ModelSpec
from slimx.preflight.hardware import GIB, Machine

PROCESS = 4 * GIB
"""Host memory of a trainer's or an engine's process beside what is counted: libraries, CUDA. Assumed."""
_TOKEN = 4 + 4 + 1
"""Bytes of a token in a group on disk: id, log-prob, mask."""
_TRAINED_TOKEN = 3 * 8 + 4 * 4 + 1
"""Bytes of a token in a batch (slimx.data.batch): what is read, its label and version; weight, advantage, log-prob and
temperature; whether it is padding."""


def host_memory(
    config: Config,
    machine: Machine,
    trainers: Sequence[TrainerMemory],
    figures: PublicationFigures | None,
    *,
    critic_own: bool,
    batches: int = 0,
    graphs: int = 0,
) -> HostMemory:
    """Host memory of the fullest node with trainer ranks, when everything there has been allocated: pinned memory is
    kept for the next time. `batches`: bytes that the driver, which may be there, keeps of them (`kept_batches`).
    `graphs`: bytes of CUDA graphs of an engine rank, which are there while it sleeps."""
    one = max(by_gpu(trainers, critic_own)[0], key=lambda rank: rank[0].host)
    ranks = min(machine.per_node, config.trainer.world_size)
    engines = ranks if config.schedule.colocate else 0
    buckets = last = here = 0
    if figures is not None and config.schedule.colocate:
        group = config.rollout.policy_engines[0]
        here = max(1, ranks // (group.ranks // group.nodes))  # machines' shares of engines on the node
    if figures is not None and not figures.on_gpus:
        buckets = figures.publisher_bytes
        if config.publish.transport == "disk":
            last = figures.kept_bytes + here * (figures.held_bytes + figures.landing_bytes)
        if config.publish.transport == "nixl":
            # Every rank has a ring, every engine here its own.
            buckets = ranks * figures.publisher_bytes + here * figures.landing_bytes
            last = ranks * figures.kept_bytes + here * figures.held_bytes
    mirrored = one[0].host_checkpoint if config.recovery.mirror_every else 0
    held = {
        "moments": ranks * sum(record.host_optimizer for record in one),
        "weights of reference and teacher": ranks * sum(record.host_copies for record in one),
        "state that leaves GPUs": ranks * sum(record.host_away for record in one),
        "activations that wait": ranks * max(record.host_activations for record in one),  # models take turns
        "tokens that indexers chose": ranks * sum(record.host_chosen for record in one),
        "copies that checkpoints are written from": ranks * sum(record.host_checkpoint for record in one),
        "copies that mirrors are sent from": ranks * mirrored,
        "mirrors of a neighbour's ranks": 2 * ranks * mirrored,  # the whole one, and the one that comes in
        "buckets of a publication": buckets,
        "weights published last": last,
        "CUDA graphs of sleeping engines": engines * graphs,
        "batches that are kept for new trainers": batches,
        "processes": (ranks + engines) * PROCESS,
    }
    ordered = sorted(held.items(), key=lambda item: -item[1])
    return HostMemory(
        memory=machine.host_memory,
        ranks=ranks,
        held=tuple(Held(what=what, nbytes=nbytes) for what, nbytes in ordered if nbytes),
    )


def kept_batches(config: Config, spec: ModelSpec, batch: BatchPlan) -> int:
    """Bytes of batches that the driver keeps for trainers that have to be replaced, at most: those of the steps between
    two checkpoints, and of as many while the second is being written."""
    if not config.recovery.trainers:
        return 0
    step = batch.tokens_per_step * _TRAINED_TOKEN
    if spec.experts and config.route_stride:
        # A micro-batch has a place for those of all its tokens if one of its rollouts came with them, and a mark for
        # each if others did not.
        rollouts = ceil(batch.rollouts_per_step / config.route_stride)
        each = max(batch.tokens_per_microbatch, batch.tokens_per_rollout)
        step += min(batch.tokens_per_step, rollouts * each) * (_routes(spec) + (config.route_stride > 1))
    return 2 * config.checkpoint.every * step


def _routes(spec: ModelSpec) -> int:
    """Bytes of a token's experts."""
    return len(spec.moe_layers) * spec.transformer["moe_router_topk"] * (1 if spec.experts <= 256 else 2)


def disk_bytes(config: Config, spec: ModelSpec, critic: ModelSpec | None, batch: BatchPlan) -> DiskBytes:
    """Bytes that the run leaves in its directory, at most."""
    options, schedule, kept = config.checkpoint, config.schedule, config.track.rollouts
    itemsize = ITEMSIZE[config.numerics.dtype]
    checkpoint = 0
    for model, trainer in ((spec, config.trainer), *([(critic, config.as_critic().trainer)] if critic else [])):
        state = FP32 + 2 * ITEMSIZE[trainer.optimizer.moments_dtype]  # of a parameter: main weight and two moments
        for run in holdings(trainer, config.numerics, model).runs(Sizes(), 0):
            each = ITEMSIZE[run.dtype] + (state if run.trained else 0)
            checkpoint += run.elements * run.count * each
    for_good = schedule.steps // options.keep_every if options.keep_every else 0
    exports = (schedule.steps // options.export_every if options.export_every else 0) + options.export_hf
    every = config.algorithm.reference_refresh
    references = min(options.keep + 1, schedule.steps // every) if every else 0
    steps = schedule.steps // kept.every if kept.every and config.rollout.policy_engines else 0
    token = _TOKEN
    if kept.routes and spec.experts:
        token += _routes(spec)
    return DiskBytes(
        checkpoint=checkpoint,
        checkpoints=options.keep + 1 + for_good,
        export=sum(prod(shape) for shape in spec.table.checkpoint_shapes().values()) * itemsize,
        exports=exports + references,
        rollouts=(min(steps, kept.keep) if kept.keep else steps) * batch.tokens_per_step * token,
    )
