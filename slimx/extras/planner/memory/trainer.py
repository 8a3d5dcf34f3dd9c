"""Memory of trainer ranks by kind: exact state, estimated activations, and what lies on the host beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from slimx.config.schema import Config
from slimx.config.sections.run import Numerics
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
"""As `slimx.extras.optimizer_offload.moments.PIECE_BYTES`, which a process without torch cannot import; a test compares
them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    """The fullest rank of a pipeline stage and what it holds whatever it computes."""

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
    states: Sequence[StageState] | None = None,
) -> tuple[TrainerMemory, ...]:
    """Memory of one rank per pipeline stage, the fullest. `config`: with the `trainer` section that its ranks follow (a
    critic's own); `publication`: bytes on the GPU of each rank while weights leave it; `merging`: bytes in which
    every rank merges weights with adapters. `states`: as `stage_states` gives them for the same sizes, where they are
    known already; only their stages are looked at."""
    if states is None:
        states = stage_states(config.trainer, holdings(config.trainer, config.numerics, spec), spec, sizes, model=model)
    setting = activation_setting(config, spec, sizes, device)
    microbatches = batch_plan(config, sizes).microbatches_per_update
    out = []
    for found in states:
        activations = activation_bytes(
            spec, config.trainer, sizes, setting, place=found.stage, microbatches=microbatches
        )
        if model == "critic" or config.algorithm.scores:  # one value per token in the place of logits
            activations = replace(activations, head=0)
        beside = (publication if model == "trainer" else 0, merging)
        out.append(_record(config, spec, setting, found, activations, model, device, *beside))
    return tuple(out)


def holdings(trainer: Trainer, numerics: Numerics, spec: ModelSpec) -> Holdings:
    """Parameters of the model that ranks hold under any layout, with what is not trained and with adapters."""
    return Holdings(spec.table, numerics.dtype, spec.frozen(trainer.frozen), trainer.lora)


def stage_states(
    trainer: Trainer,
    held: Holdings,
    spec: ModelSpec,
    sizes: Sizes,
    *,
    model: Literal["trainer", "critic"] = "trainer",
    quick: bool = False,
) -> tuple[StageState, ...]:
    """State of the fullest rank of each pipeline stage. `quick`: of stages unlike those before them only, one of which
    is the fullest, and of the first rank of each."""
    out = []
    for stage in held.unlike_stages(sizes) if quick else range(sizes.pipeline):
        head = _value_head(spec, sizes, stage) if model == "critic" else []
        out.append(_fullest(held, trainer, sizes, stage, head, 1 if quick else sizes.stage))
    return tuple(out)


def activation_setting(config: Config, spec: ModelSpec, sizes: Sizes, device: str) -> Setting:
    """A micro-batch that is full, of the longest rollouts; the kernels that `device` has."""
    limit = config.trainer.max_tokens_per_microbatch
    longest = config.rollout.longest
    latent = bool(spec.transformer.get("multi_latent_attention"))
    # torch's CPU kernel wants queries and values of one size; "unfused" is Transformer Engine's or torch's plain form.
    materialised = latent if device == "cpu" else config.trainer.attention == "unfused"
    by_kind = spec.layer_kind.materialises(config.trainer)
    materialised = materialised if by_kind is None else by_kind
    return Setting(
        tokens=-(-limit // sizes.context),
        length=min(longest, limit) if config.rollout.policy_engines else limit,
        sizes=sizes,
        itemsize=ITEMSIZE[config.numerics.dtype],
        kernels="torch" if device == "cpu" else "engine",
        materialised=materialised,
        masked=device == "cuda" and spec.transformer.get("softmax_type") == "learnable",
    )


def _value_head(spec: ModelSpec, sizes: Sizes, stage: int) -> list[ParameterRun]:
    """A critic's head on the last stage, fp32 (`slimx.extras.token_level.value_model`)."""
    if stage < sizes.pipeline - 1:
        return []
    alike = {"chunk": sizes.virtual - 1, "count": 1, "dtype": "float32"}
    hidden = spec.transformer["hidden_size"]
    return [ParameterRun(name=f"value_head.{n}", elements=e, **alike) for n, e in (("weight", hidden), ("bias", 1))]


def _fullest(
    held: Holdings, trainer: Trainer, sizes: Sizes, stage: int, head: list[ParameterRun], count: int
) -> StageState:
    """Returns the rank with most state of a stage's first `count`. Ranks differ in gaps of their shares and, frozen
    experts aside, in nothing else."""
    ranks = stage * sizes.stage + np.arange(count)
    # Frozen experts make a difference between expert ranks.
    own = ranks // sizes.expert_tensor % sizes.expert if held.frozen else 0 * ranks
    found: dict[int, tuple[int, Buffers]] = {}
    for expert in np.unique(own):
        alike = ranks[own == expert]
        buffers = Buffers(held.runs(sizes, int(alike[0])) + head, trainer, sizes)
        owned = buffers.owned(alike)
        found[int(alike[owned.argmax()])] = int(owned.max()), buffers
    rank = max(sorted(found), key=lambda rank: found[rank][0])
    return StageState(stage=stage, rank=rank, state=found[rank][1].of(rank))


def _record(
    config: Config,
    spec: ModelSpec,
    setting: Setting,
    found: StageState,
    activations: ActivationBytes,
    model: Literal["trainer", "critic"],
    device: str,
    buckets: int,
    merging: int,
) -> TrainerMemory:
    state = found.state
    hosted = round(state.moments * config.trainer.optimizer.offload_fraction)
    step = min(MOMENT_PIECE, hosted) + state.copied
    dispatched = _dispatched(spec, setting)
    dispatcher = trainer_buffers(config.trainer, spec, setting.sizes, device)
    overhead = OVERHEAD if device == "cuda" else 0
    served = _served(config, state) if model == "trainer" else 0
    engine = model == "trainer" and device != "cpu"  # the layers of the CPU keep none
    copies = rounding_of(config.trainer).kept_bytes(state.quantised) if engine else 0
    # In exact mode layers multiply by merged weights, which are kept from the forward pass to the backward pass.
    merged = merging + (state.adapted * ITEMSIZE[config.numerics.dtype] if config.exact else 0)
    static = state.weights + served + merged + state.gradients + state.optimizer - hosted + copies
    moving = config.schedule.colocate and config.trainer.offload
    copied = config.algorithm.reference and config.trainer.lora is None  # beside adapters it is the base
    others = copied + bool(config.algorithm.teacher) if model == "trainer" else 0
    # Parameters that the distributed optimizer cuts between two ranks are taken as whole.
    rounded = device == "cuda" and bool(config.trainer.offload_activations)  # `slimx.runtime.allocator`
    share, away = (state.pinned_share, state.pinned_weights) if rounded else (1.0, state.weights)
    return TrainerMemory(
        model=model,
        stage=found.stage,
        rank=found.rank,
        parameters=state.elements,
        weights=state.weights + served + merged,
        gradients=state.gradients,
        optimizer=state.optimizer - hosted,
        moments=state.moments - hosted,
        activations=activations.kept,
        head=activations.head,
        work=activations.work,
        step=step,
        copies=copies,
        communication=dispatched,
        dispatcher=dispatcher,
        publication=buckets,
        overhead=overhead,
        in_flight=activations.in_flight,
        peak=static + overhead + dispatcher + max(activations.peak + dispatched, step, buckets),
        away=overhead + dispatcher + (served + merging if moving else static),
        host_optimizer=round(hosted * share),
        host_copies=round(state.weights * share) * (others + 1) if others else 0,
        host_away=away + round((state.optimizer - hosted) * share) if moving else 0,
        host_chosen=_chosen(config, spec, setting, found.stage) if model == "trainer" else 0,
        host_checkpoint=round((state.weights + state.optimizer - hosted) * share) + hosted,
        host_activations=2 * activations.hosted,
        moved=activations.moved * batch_plan(config, setting.sizes).microbatches_per_update,
        parts=activations.parts,
    )


def _chosen(config: Config, spec: ModelSpec, setting: Setting, stage: int) -> int:
    """Bytes of a step's choices of layers that training repeats, on one rank, its micro-batches full."""
    if config.trainer.indexer_replay != "R2":
        return 0
    sizes = setting.sizes
    microbatches = batch_plan(config, sizes).microbatches_per_update * config.schedule.updates_per_step
    layers, length = stage_layers(sizes, spec.table.layers)[stage], setting.tokens * sizes.context
    return microbatches * spec.layer_kind.replay_bytes(spec.transformer, setting.tokens, length, layers)


def _served(config: Config, state: StateBytes) -> int:
    """Bytes of exact mode's `ServedWeights`: codes and what they are widened to; scales are left out."""
    return state.quantised * (1 + ITEMSIZE[config.numerics.dtype]) if config.exact and config.publish.quantise else 0


def _dispatched(spec: ModelSpec, setting: Setting) -> int:
    """Bytes of the chosen tokens, sent and received, where experts are on several ranks."""
    sizes = setting.sizes
    if not spec.experts or sizes.expert * sizes.expert_tensor == 1:
        return 0
    copies = setting.share * spec.transformer["moe_router_topk"] * sizes.expert_tensor
    return round(2 * copies * spec.transformer["hidden_size"] * setting.itemsize)
