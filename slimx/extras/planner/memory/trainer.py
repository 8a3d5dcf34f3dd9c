"""Memory of trainer ranks: exact weights, gradients and optimizer state, estimated activations, and host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from slimx.config.schema import Config
from slimx.config.sections.general import Numerics
from slimx.config.sections.trainer import Trainer
from slimx.extras.planner.batch_plan import batch_plan
from slimx.extras.planner.memory.activations import Setting
from slimx.extras.planner.memory.deep_ep import trainer_buffers
from slimx.extras.planner.memory.parameter_runs import Holdings, ParameterRun
from slimx.extras.planner.memory.pipeline import ActivationBytes, activation_bytes
from slimx.extras.planner.memory.state import Buffers, StateBytes
from slimx.extras.planner.memory_record import TrainerMemory
from slimx.layout.number_formats import ITEMSIZE
from slimx.layout.ranks import Sizes, stage_layers
from slimx.models.families import ModelSpec
from slimx.numerics.rounding import rounding_of
from slimx.preflight.hardware import OVERHEAD

INT32 = 4
MOMENT_PIECE = 512 * 2**20
"""Bytes of offloaded optimizer moments that are on the GPU at a time. Copy of
`slimx.extras.optimizer_offload.moments.PIECE_BYTES`, which a process without torch cannot import; a test compares the
two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    """Weights, gradients and optimizer state of the fullest rank of a pipeline stage: the memory that does not depend
    on activations."""

    stage: int
    rank: int
    state: StateBytes


def trainer_memory(
    config: Config,
    spec: ModelSpec,
    sizes: Sizes,
    device: str,
    *,
    model: Literal["trainer", "critic"] = "trainer",
    publication: int = 0,
    merging: int = 0,
    registered: int = 0,
    states: Sequence[StageState] | None = None,
) -> tuple[TrainerMemory, ...]:
    """Returns the memory of the fullest rank of each pipeline stage.

    `config`: configuration whose section `trainer` describes the ranks of `model`. `publication`: bytes of GPU memory
    on each rank during publications of weights; `registered`: bytes that they keep. `merging`: bytes that every rank
    needs to merge weights with adapters. `states`: result of `stage_states` for the same sizes, to compute only the
    stages that it contains; None: compute all stages."""
    if states is None:
        states = stage_states(config.trainer, holdings(config.trainer, config.numerics, spec), spec, sizes, model=model)
    setting = activation_setting(config, spec, sizes, device)
    microbatches = batch_plan(config, sizes).microbatches_per_update
    buckets = publication if model == "trainer" else 0
    kept = registered if model == "trainer" else 0
    out = []
    for stage in states:
        activations = activation_bytes(
            spec, config.trainer, sizes, setting, pipeline_rank=stage.stage, microbatches=microbatches
        )
        if model == "critic" or config.algorithm.scores:  # one value per token instead of logits
            activations = replace(activations, head=0)
        out.append(_record(config, spec, setting, stage, activations, model, device, buckets, merging, kept))
    return tuple(out)


def holdings(trainer: Trainer, numerics: Numerics, spec: ModelSpec) -> Holdings:
    """Returns the model's Holdings: all its parameters, including frozen ones and adapters. The parameters of any rank
    in any layout are derived from them."""
    return Holdings(spec.table, numerics.dtype, spec.frozen(trainer.frozen), trainer.lora)


def stage_states(
    trainer: Trainer,
    parameters: Holdings,
    spec: ModelSpec,
    sizes: Sizes,
    *,
    model: Literal["trainer", "critic"] = "trainer",
    quick: bool = False,
) -> tuple[StageState, ...]:
    """Returns the state of the fullest rank of each pipeline stage.

    `quick`: compute only stages whose layers differ from those of all earlier stages (one of these is the fullest
    stage), and only the first rank of each."""
    stages: Sequence[int] = range(sizes.pipeline)
    count = sizes.stage
    if quick:
        stages = parameters.unlike_stages(sizes)
        count = 1
    out = []
    for stage in stages:
        head = _value_head(spec, sizes, stage) if model == "critic" else []
        out.append(_fullest(parameters, trainer, sizes, stage, head, count))
    return tuple(out)


def activation_setting(config: Config, spec: ModelSpec, sizes: Sizes, device: str) -> Setting:
    """Returns the properties that determine the activation memory of a full micro-batch, assuming rollouts of the
    maximum length and the kernels used on `device`."""
    limit = config.trainer.max_tokens_per_microbatch
    latent = bool(spec.transformer.get("multi_latent_attention"))
    # torch's CPU kernel needs queries and values of one size; "unfused" is Transformer Engine's or torch's plain form.
    materialized = latent if device == "cpu" else config.trainer.attention == "unfused"
    by_kind = spec.layer_kind.materializes(config.trainer)
    if by_kind is not None:
        materialized = by_kind
    length = limit
    if config.served.policy:
        length = min(config.rollout.longest, limit)
    return Setting(
        tokens=-(-limit // sizes.context),
        length=length,
        sizes=sizes,
        itemsize=ITEMSIZE[config.numerics.dtype],
        kernels="torch" if device == "cpu" else "engine",
        materialized=materialized,
        masked=device == "cuda" and spec.transformer.get("softmax_type") == "learnable",
    )


def _value_head(spec: ModelSpec, sizes: Sizes, stage: int) -> list[ParameterRun]:
    """Returns the fp32 value head of a critic if `stage` is the last, otherwise []
    (`slimx.extras.token_level.value_model`)."""
    if stage < sizes.pipeline - 1:
        return []
    chunk = sizes.virtual - 1
    hidden = spec.transformer["hidden_size"]
    return [
        ParameterRun(name="value_head.weight", elements=hidden, chunk=chunk, count=1, dtype="float32"),
        ParameterRun(name="value_head.bias", elements=1, chunk=chunk, count=1, dtype="float32"),
    ]


def _fullest(
    parameters: Holdings, trainer: Trainer, sizes: Sizes, stage: int, head: list[ParameterRun], count: int
) -> StageState:
    """Returns the state of the fullest rank among the first `count` ranks of a stage. Ranks of a stage differ only in
    the alignment gaps of their shards and in frozen experts."""
    ranks = stage * sizes.stage + np.arange(count)
    # With frozen experts, expert ranks differ.
    expert_ranks = np.zeros_like(ranks)
    if parameters.frozen:
        expert_ranks = ranks // sizes.expert_tensor % sizes.expert
    by_rank: dict[int, tuple[int, Buffers]] = {}
    for expert_rank in np.unique(expert_ranks):
        alike = ranks[expert_ranks == expert_rank]
        buffers = Buffers(parameters.runs(sizes, int(alike[0])) + head, trainer, sizes)
        nbytes = buffers.optimizer_bytes(alike)
        by_rank[int(alike[nbytes.argmax()])] = int(nbytes.max()), buffers
    rank = max(sorted(by_rank), key=lambda rank: by_rank[rank][0])
    _, buffers = by_rank[rank]
    return StageState(stage=stage, rank=rank, state=buffers.state(rank))


def _record(
    config: Config,
    spec: ModelSpec,
    setting: Setting,
    stage: StageState,
    activations: ActivationBytes,
    model: Literal["trainer", "critic"],
    device: str,
    buckets: int,
    merging: int,
    kept: int,
) -> TrainerMemory:
    state = stage.state
    hosted = round(state.moments * config.trainer.optimizer.offload_fraction)
    optimizer = state.optimizer - hosted
    step = min(MOMENT_PIECE, hosted) + state.copied
    dispatched = _dispatched(spec, setting)
    dispatcher = trainer_buffers(config.trainer, spec, setting.sizes, device)
    overhead = OVERHEAD if device == "cuda" else 0
    policy = _policy_bytes(config, spec, setting, stage, model, device)
    weights = state.weights + policy.served + merging + _merged(config, state)
    static = overhead + dispatcher + weights + state.gradients + optimizer + policy.copies
    away = static
    if config.schedule.colocate and config.trainer.offload:
        away = overhead + dispatcher + policy.served + merging
    host = _host_bytes(config, state, model, device, hosted)
    return TrainerMemory(
        model=model,
        stage=stage.stage,
        rank=stage.rank,
        parameters=state.elements,
        weights=weights,
        gradients=state.gradients,
        optimizer=optimizer,
        moments=state.moments - hosted,
        activations=activations.kept,
        head=activations.head,
        work=activations.work,
        step=step,
        copies=policy.copies,
        communication=dispatched,
        dispatcher=dispatcher,
        registered=kept,
        publication=buckets,
        overhead=overhead,
        in_flight=activations.in_flight,
        peak=static + kept + max(activations.peak + dispatched, step, buckets),
        away=away,
        host_optimizer=host.optimizer,
        host_copies=host.copies,
        host_away=host.away,
        host_chosen=policy.chosen,
        host_checkpoint=host.checkpoint,
        host_activations=2 * activations.hosted,
        moved=activations.moved * batch_plan(config, setting.sizes).microbatches_per_update,
        parts=activations.parts,
    )


class _PolicyBytes(NamedTuple):
    """Memory, in bytes, that a rank of the policy needs but a rank of the critic does not."""

    served: int
    """Bytes of the quantized weights that exact mode computes with."""
    copies: int
    """Bytes of the quantized weight copies that layers keep on the GPU."""
    chosen: int
    """Bytes of host memory for the recorded token selections of sparse attention (trainer.indexer_replay)."""


def _policy_bytes(
    config: Config,
    spec: ModelSpec,
    setting: Setting,
    stage: StageState,
    model: Literal["trainer", "critic"],
    device: str,
) -> _PolicyBytes:
    """Returns the memory that only a rank of the policy needs; zeros for a rank of the critic."""
    if model == "critic":
        return _PolicyBytes(served=0, copies=0, chosen=0)
    return _PolicyBytes(
        served=_served(config, stage.state),
        copies=_rounded_copies(config, stage.state, device),
        chosen=_chosen(config, spec, setting, stage.stage),
    )


class _HostBytes(NamedTuple):
    """Pinned host memory of a trainer rank by purpose, in bytes."""

    optimizer: int
    """Bytes of optimizer moments that are kept in host memory."""
    copies: int
    """Bytes of the weights of the reference and the teacher, and of the policy's weights while those of another model
    replace them on the GPU."""
    away: int
    """Bytes of offloaded state in host memory, kept until the trainer returns to the GPU."""
    checkpoint: int
    """Bytes of the copy from which checkpoints are written."""


def _host_bytes(
    config: Config, state: StateBytes, model: Literal["trainer", "critic"], device: str, hosted: int
) -> _HostBytes:
    """Returns the size in bytes of a rank's pinned host memory, by purpose. `hosted`: bytes of moments that are kept on
    the host."""
    # Parameters that the distributed optimizer splits between two ranks are counted completely.
    pinned_ratio = 1.0
    pinned_weights = state.weights
    if device == "cuda" and config.trainer.offload_activations:  # sizes are rounded up: `slimx.runtime.allocator`
        pinned_ratio = state.pinned_share
        pinned_weights = state.pinned_weights
    on_device = state.optimizer - hosted
    copies = 0
    others = _other_models(config)
    if model == "trainer" and others > 0:
        copies = round(state.weights * pinned_ratio) * (others + 1)
    away = 0
    if config.schedule.colocate and config.trainer.offload:
        away = pinned_weights + round(on_device * pinned_ratio)
    return _HostBytes(
        optimizer=round(hosted * pinned_ratio),
        copies=copies,
        away=away,
        checkpoint=round((state.weights + on_device) * pinned_ratio) + hosted,
    )


def _rounded_copies(config: Config, state: StateBytes, device: str) -> int:
    """Returns the size in bytes of the quantized weight copies that layers keep on GPUs; 0 on CPUs, where layers keep
    none."""
    if device == "cpu":
        return 0
    return rounding_of(config.trainer).kept_bytes(state.quantized)


def _merged(config: Config, state: StateBytes) -> int:
    """Returns the size in bytes of the merged weights that layers compute with in exact mode and keep until the
    backward pass."""
    if not config.exact:
        return 0
    return state.adapted * ITEMSIZE[config.numerics.dtype]


def _other_models(config: Config) -> int:
    """Returns the number of models other than the policy whose weights a trainer rank keeps in host memory."""
    models = 0
    if config.algorithm.reference and config.trainer.lora is None:  # with adapters, the base weights are the reference
        models += 1
    if config.algorithm.teacher:
        models += 1
    return models


def _chosen(config: Config, spec: ModelSpec, setting: Setting, stage: int) -> int:
    """Returns the size in bytes of the token selections of sparse attention (which tokens each token attends to) that
    one rank keeps for replay in one step, with full micro-batches."""
    if config.trainer.indexer_replay != "R2":
        return 0
    sizes = setting.sizes
    microbatches = batch_plan(config, sizes).microbatches_per_update * config.schedule.updates_per_step
    layers = stage_layers(sizes, spec.table.layers)[stage]
    length = setting.tokens * sizes.context
    return microbatches * spec.layer_kind.replay_bytes(spec.transformer, setting.tokens, length, layers)


def _served(config: Config, state: StateBytes) -> int:
    """Returns the size in bytes of the quantized weights that exact mode computes with (`ServedWeights`): their codes
    and their dequantized values. Scales are not counted."""
    if not config.exact or not config.publish.quantize:
        return 0
    return state.quantized * (1 + ITEMSIZE[config.numerics.dtype])


def _dispatched(spec: ModelSpec, setting: Setting) -> int:
    """Returns the size in bytes of the tokens that are sent to and received from experts on other ranks; 0 if all
    experts are on one rank."""
    sizes = setting.sizes
    if not spec.experts or sizes.expert * sizes.expert_tensor == 1:
        return 0
    copies = setting.share * spec.transformer["moe_router_topk"] * sizes.expert_tensor
    return round(2 * copies * spec.transformer["hidden_size"] * setting.itemsize)
