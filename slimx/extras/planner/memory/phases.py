"""Memory of a GPU in every phase of a run: the sum over a trainer rank and an engine rank that are on it.

    phase      trainer rank                              engine rank, on the same GPU     on a separate GPU
    load       weights twice or main weights, gradients  -                                -
    start      what remains (nothing, or all)            all of it                        all of it
    restore    its state                                 asleep                           -
    publish    weights, buckets                          weights, staged weights          all of it, staged weights
    generate   what remains                              all of it                        all of it
    sleep      its state returns                         asleep                           -
    train      its state, activations                    asleep                           -
    save       its state                                 asleep                           -
    wake       weights                                   weights                          -

"State" is weights, gradients and optimizer state. Weights exist twice while Megatron's buffers are filled from the
weights that the model was built with. A trainer whose engines have separate GPUs, or without `trainer.offload`, always
keeps its state. A sleeping engine rank keeps its context, DeepEP's buffers and receive buffers registered with NIXL, as
trainer ranks keep their send buffers; its CUDA graphs are moved to host memory and return with the KV cache. Buffers
are counted in all phases, although the first publication allocates them. Checkpoints are written from the
state and read into it, without additional memory. The order of phases is that of `slimx.orchestration`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from typing import Literal, get_args

from slimx.extras.planner.memory_record import (
    ColocatedMemory,
    EngineMemory,
    MemoryPart,
    Phase,
    PhasePeak,
    TrainerMemory,
)
from slimx.preflight.hardware import Machine

PHASES: tuple[Phase, ...] = get_args(Phase)
_TRAINERS: tuple[Phase, ...] = ("load", "restore", "publish", "generate", "train", "save")
_ENGINES: tuple[Phase, ...] = ("start", "publish", "generate")
"""Phases in which a GPU with only an engine rank uses memory; `_TRAINERS`: the same for a GPU with only a trainer
rank."""
_Bytes = dict[str, int]
_Gpu = Literal["trainer", "critic", "engine", "shared"]


def phase_memory(
    machine: Machine,
    trainers: Sequence[TrainerMemory],
    engines: Sequence[EngineMemory],
    *,
    separate_critic: bool,
    colocate: bool,
    offload: bool,
    apart: Collection[str] = (),
) -> tuple[PhasePeak, ...]:
    """Returns, for each kind of GPU and each of its phases, the memory of the fullest GPU; () if the size of GPU memory
    is unknown.

    `trainers`: ranks of the policy and of the critic. `engines`: ranks of the policy's engines, one per group.
    `separate_critic`: True if the critic has separate ranks. `colocate`, `offload`: `schedule.colocate` and
    `trainer.offload`. `apart`: names of the engine groups that share no GPUs even if `colocate` is True."""
    if machine.memory is None:
        return ()
    ranks, critics = by_gpu(trainers, separate_critic)
    out: list[PhasePeak] = []
    if colocate and engines:
        for phase in PHASES:
            peaks = []
            for engine, rank in product((engine for engine in engines if engine.group not in apart), ranks):
                parts = _turn(rank, phase, offload) | _engine(engine, phase, shared=True)
                peaks.append(_peak(phase, engine.group, parts))
            out.append(max(peaks, key=lambda peak: peak.nbytes))
    else:
        out += _fullest("trainer", ranks, engines)
    out += _fullest("critic", critics, ())
    for engine in engines:
        if not colocate or engine.group in apart:
            for phase in _ENGINES:
                out.append(_peak(phase, engine.group, _engine(engine, phase, shared=False), gpu="engine"))
    return tuple(out)


def by_gpu(
    records: Sequence[TrainerMemory], separate_critic: bool
) -> tuple[list[list[TrainerMemory]], list[list[TrainerMemory]]]:
    """Returns two lists: trainer ranks and ranks of a separate critic. Each rank is a list of memory records, one for
    each model in its process. A critic without separate ranks is added to the trainer rank of the same pipeline
    stage."""
    policy: list[list[TrainerMemory]] = []
    critics: list[list[TrainerMemory]] = []
    for record in records:
        if record.model == "trainer":
            policy.append([record])
        else:
            critics.append([record])
    if separate_critic:
        return policy, critics
    for rank in policy:
        for critic in critics:
            if critic[0].stage == rank[0].stage:
                rank += critic
    return policy, []


def peak_of(rank: Sequence[TrainerMemory]) -> int:
    """Returns the peak memory of a process with the models in `rank`. The activations of these models are never in
    memory at the same time."""
    states = [record.weights + record.gradients + record.optimizer for record in rank]
    return sum(states) + max(record.peak - state for record, state in zip(rank, states, strict=True))


def _fullest(
    gpu: _Gpu, ranks: Sequence[Sequence[TrainerMemory]], engines: Sequence[EngineMemory]
) -> Iterator[PhasePeak]:
    if not ranks:
        return
    for phase in _TRAINERS:
        if phase in ("publish", "generate") and (gpu == "critic" or not engines):
            continue
        peaks = [_peak(phase, "", _kept(rank, phase), gpu=gpu) for rank in ranks]
        yield max(peaks, key=lambda peak: peak.nbytes)


def _peak(phase: Phase, group: str, sizes: _Bytes, gpu: _Gpu = "shared") -> PhasePeak:
    return PhasePeak(gpu=gpu, group=group, phase=phase, parts=memory_parts(sizes))


def memory_parts(sizes: Mapping[str, int]) -> tuple[MemoryPart, ...]:
    """Returns the non-empty entries of `sizes`, bytes by purpose, largest first."""
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    return tuple(MemoryPart(name=name, nbytes=nbytes) for name, nbytes in ordered if nbytes)


def _turn(rank: Sequence[TrainerMemory], phase: Phase, offload: bool) -> _Bytes:
    """Returns the memory, in bytes by purpose, of a trainer rank that shares its GPU with an engine."""
    if phase in ("publish", "wake") and offload:
        parts = _kept(rank, phase)
        for name in ("gradients", "optimizer state", "codes in fp8"):
            parts.pop(name, None)
        return parts
    if phase in ("start", "generate"):
        left = sum(record.away - record.overhead - record.dispatcher for record in rank)
        return _process(rank) | {"trainer's state": left}
    return _kept(rank, phase)


def _kept(rank: Sequence[TrainerMemory], phase: Phase) -> _Bytes:
    """Returns the memory, in bytes by purpose, of a trainer rank whose state stays on the GPU."""

    def total(*fields: str) -> int:
        nbytes = 0
        for record in rank:
            nbytes += sum(getattr(record, field) for field in fields)
        return nbytes

    weights = total("weights")
    gradients = total("gradients")
    overhead = _process(rank)
    if phase == "load":
        main = total("optimizer") - total("moments")
        # megatron-core copies trained parameters into its buffers before it frees the originals.
        copied = min(weights, gradients)
        twice = {"main weights": main}
        if copied > main:
            twice = {"weights in the making": copied}
        return {"weights": weights, "gradients": gradients} | twice | overhead
    state = {"weights": weights, "gradients": gradients, "optimizer state": total("optimizer")} | overhead
    state["codes in fp8"] = total("copies")
    if phase == "publish":
        state["buckets"] = total("publication")
    elif phase == "train":
        # Only one model of a rank has activations at a time.
        record = max(rank, key=_busy)
        if record.step > _activations(record):
            state["moments, gradients at work"] = record.step
        else:
            state["activations"] = record.activations
            state["gradients of a layer, logits"] = max(record.head, record.work)
            state["tokens for experts"] = record.communication
    return state


def _process(rank: Sequence[TrainerMemory]) -> _Bytes:
    """Returns the memory, in bytes by purpose, that the process of `rank` needs only once, whatever the number of its
    models."""
    buffers = max(record.dispatcher for record in rank)
    return {
        "trainer's overhead": max(record.overhead for record in rank),
        "trainer's DeepEP buffers": buffers,
        "trainer's send buffers": sum(record.registered for record in rank),
    }


def _activations(record: TrainerMemory) -> int:
    return record.activations + max(record.head, record.work) + record.communication


def _busy(record: TrainerMemory) -> int:
    return max(_activations(record), record.step)


def _engine(engine: EngineMemory, phase: Phase, *, shared: bool) -> _Bytes:
    """Returns the memory, in bytes by purpose, of an engine rank in `phase`. `shared`: True if it alternates with a
    trainer rank on the same GPU."""
    if shared and phase == "load":
        return {}
    parts = {
        "engine's overhead": engine.overhead,
        "engine's DeepEP buffers": engine.dispatcher,
        "engine's receive buffers": engine.registered,
    }
    if shared and phase not in ("start", "generate", "publish", "wake"):
        return parts
    parts["engine's weights"] = engine.weights
    if phase == "publish":
        parts["staged weights"] = engine.staged
    if phase in ("start", "generate") or not shared:
        parts |= {"KV cache": engine.cache, "recurrent states": engine.states, "CUDA graphs": engine.graphs}
        parts |= {"engine's activations": engine.work, "images in the engine": engine.images}
    return parts


def colocated_memory(
    machine: Machine, phases: Sequence[PhasePeak], engines: Sequence[EngineMemory]
) -> ColocatedMemory | None:
    """Returns the memory of the fullest GPU that trainer and engine share; None if they share no GPU, or if the size of
    GPU memory is unknown."""
    shared = {peak.phase: peak.nbytes for peak in phases if peak.gpu == "shared"}
    if machine.memory is None or not shared:
        return None
    return ColocatedMemory(
        memory=machine.memory,
        training=shared["train"],
        generating=shared["generate"],
        publishing=shared["publish"],
        engine_asleep=max(engine.overhead + engine.dispatcher + engine.registered for engine in engines),
        margin=machine.memory - max(shared.values()),
    )
