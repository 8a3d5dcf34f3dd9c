"""Memory of a GPU in every phase of a run: what a trainer rank and an engine rank hold there, together.

    phase      trainer rank                              engine rank, on the same GPU     on its own
    load       weights twice or main weights, gradients  -                                -
    start      what it leaves (nothing, or all)          all of it                        all of it
    restore    its state                                 asleep                           -
    publish    weights, buckets                          weights, what is staged          all of it, what is staged
    generate   what it leaves                            all of it                        all of it
    sleep      its state comes back                      asleep                           -
    train      its state, activations                    asleep                           -
    save       its state                                 asleep                           -
    wake       weights                                   weights                          -

Weights are twice there while Megatron's buffers are filled with those that the model was built with. A trainer whose
engines have GPUs of their own (or without `trainer.offload`) keeps its state always. An engine rank that sleeps keeps
its context and DeepEP's buffers; its CUDA graphs go to host memory, and come back with the KV cache. The first
publication is like all others. Checkpoints are written from the state and read into it, without more memory. The order
of phases is that of `slimx.orchestration`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

from slimx.extras.planner.memory_record import ColocatedMemory, EngineMemory, Held, Phase, PhaseMemory, TrainerMemory
from slimx.preflight.hardware import Machine

PHASES: tuple[Phase, ...] = get_args(Phase)
_TRAINERS: tuple[Phase, ...] = ("load", "restore", "publish", "generate", "train", "save")
_ENGINES: tuple[Phase, ...] = ("start", "publish", "generate")
"""Phases of a GPU with a trainer rank alone, and of one with an engine rank alone."""
_Bytes = dict[str, int]


def phase_memory(
    machine: Machine,
    trainers: Sequence[TrainerMemory],
    engines: Sequence[EngineMemory],
    *,
    critic_own: bool,
    colocate: bool,
    offload: bool,
) -> tuple[PhaseMemory, ...]:
    """The fullest GPU of each kind in each of its phases; () where the GPU's memory is unknown. `trainers`: of the
    policy and of a critic; `engines`: of the policy."""
    if machine.memory is None:
        return ()
    ranks, critics = by_gpu(trainers, critic_own)
    out: list[PhaseMemory] = []
    if colocate and engines:
        pairs = [(record.group, rank, record) for record in engines for rank in ranks]
        for phase in PHASES:
            found = [
                _made(phase, group, _turn(rank, phase, offload) | _engine(engine, phase, shared=True))
                for group, rank, engine in pairs
            ]
            out.append(max(found, key=lambda each: each.nbytes))
    else:
        out += _fullest("trainer", ranks, engines)
    out += _fullest("critic", critics, ())
    if not colocate:
        for engine in engines:
            for phase in _ENGINES:
                out.append(_made(phase, engine.group, _engine(engine, phase, shared=False), gpu="engine"))
    return tuple(out)


def by_gpu(
    records: Sequence[TrainerMemory], critic_own: bool
) -> tuple[list[list[TrainerMemory]], list[list[TrainerMemory]]]:
    """The records of ranks that are one process, of trainers and of a critic's own ranks: a shared critic's are with
    the trainer's of the same stage."""
    policy = [[record] for record in records if record.model == "trainer"]
    critics = [record for record in records if record.model == "critic"]
    if critic_own:
        return policy, [[record] for record in critics]
    for rank in policy:
        rank += [record for record in critics if record.stage == rank[0].stage]
    return policy, []


def peak_of(rank: Sequence[TrainerMemory]) -> int:
    """Peak of a rank that is one process for all these models, which take turns with activations."""
    states = [record.weights + record.gradients + record.optimizer for record in rank]
    return sum(states) + max(record.peak - state for record, state in zip(rank, states, strict=True))


def _fullest(
    gpu: str, ranks: Sequence[Sequence[TrainerMemory]], engines: Sequence[EngineMemory]
) -> Iterator[PhaseMemory]:
    for phase in _TRAINERS if ranks else ():
        if phase in ("publish", "generate") and (gpu == "critic" or not engines):
            continue
        found = [_made(phase, "", _kept(rank, phase), gpu=gpu) for rank in ranks]
        yield max(found, key=lambda each: each.nbytes)


def _made(phase: Phase, group: str, held: _Bytes, gpu: str = "shared") -> PhaseMemory:
    ordered = sorted(held.items(), key=lambda item: -item[1])
    return PhaseMemory(
        gpu=gpu, group=group, phase=phase, held=tuple(Held(what=what, nbytes=n) for what, n in ordered if n)
    )


def _turn(rank: Sequence[TrainerMemory], phase: Phase, offload: bool) -> _Bytes:
    """Bytes of a trainer rank that takes turns with an engine, by holder."""
    if phase in ("publish", "wake") and offload:
        parts = _kept(rank, phase)
        return {what: n for what, n in parts.items() if what not in ("gradients", "optimizer state", "codes in fp8")}
    if phase in ("start", "generate"):
        left = sum(record.away - record.overhead - record.dispatcher for record in rank)
        return _process(rank) | {"trainer's state": left}
    return _kept(rank, phase)


def _kept(rank: Sequence[TrainerMemory], phase: Phase) -> _Bytes:
    """Bytes of a trainer rank whose state stays on the device, by holder."""

    def total(*fields: str) -> int:
        return sum(getattr(record, field) for record in rank for field in fields)

    weights, gradients = total("weights"), total("gradients")
    overhead = _process(rank)
    if phase == "load":
        main = total("optimizer") - total("moments")
        # megatron-core copies what is trained into its buffers, and frees what it was.
        copied = min(weights, gradients)
        twice = {"weights in the making": copied} if copied > main else {"main weights": main}
        return {"weights": weights, "gradients": gradients} | twice | overhead
    state = {"weights": weights, "gradients": gradients, "optimizer state": total("optimizer")} | overhead
    state["codes in fp8"] = total("copies")
    if phase == "publish":
        state["buckets"] = total("publication")
    elif phase == "train":
        # The models of a rank take turns with activations.
        record = max(rank, key=_busy)
        if record.step > _activations(record):
            state["moments, gradients at work"] = record.step
        else:
            state["activations"] = record.activations
            state["gradients of a layer, logits"] = max(record.head, record.work)
            state["tokens for experts"] = record.communication
    return state


def _process(rank: Sequence[TrainerMemory]) -> _Bytes:
    """Bytes that the models of a rank have in common, by holder."""
    buffers = max(record.dispatcher for record in rank)
    return {"trainer's overhead": max(record.overhead for record in rank), "trainer's DeepEP buffers": buffers}


def _activations(record: TrainerMemory) -> int:
    return record.activations + max(record.head, record.work) + record.communication


def _busy(record: TrainerMemory) -> int:
    return max(_activations(record), record.step)


def _engine(engine: EngineMemory, phase: Phase, *, shared: bool) -> _Bytes:
    """Bytes of an engine rank, by holder; `shared`: in turns with a trainer rank."""
    if shared and phase == "load":
        return {}
    own = {"engine's overhead": engine.overhead, "engine's DeepEP buffers": engine.dispatcher}
    if shared and phase not in ("start", "generate", "publish", "wake"):
        return own
    own["engine's weights"] = engine.weights
    if phase == "publish":
        own["staged weights"] = engine.staged
    if phase in ("start", "generate") or not shared:
        own |= {"KV cache": engine.cache, "recurrent states": engine.states, "CUDA graphs": engine.graphs}
        own["engine's activations"] = engine.work
    return own


def colocated_memory(
    machine: Machine, phases: Sequence[PhaseMemory], engines: Sequence[EngineMemory]
) -> ColocatedMemory | None:
    """The fullest shared GPU; None without one, or where the GPU is unknown."""
    shared = {each.phase: each.nbytes for each in phases if each.gpu == "shared"}
    if machine.memory is None or not shared:
        return None
    return ColocatedMemory(
        memory=machine.memory,
        training=shared["train"],
        generating=shared["generate"],
        publishing=shared["publish"],
        engine_asleep=max(engine.overhead + engine.dispatcher for engine in engines),
        margin=machine.memory - max(shared.values()),
    )
