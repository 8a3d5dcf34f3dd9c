"""Rules about the memory of a GPU and of a node."""

from __future__ import annotations

from collections.abc import Iterator

from slimx.config.rule import rule
from slimx.config.sections.critic import Critic
from slimx.config.sections.rollout import Rollout
from slimx.config.sections.trainer import Trainer
from slimx.preflight.hardware import Machine
from slimx.preflight.record import ColocatedMemory, EngineMemory, TrainerMemory

GIB = 2**30
MIB = 2**20


@rule("memory.trainer", about="trainer")
def trains(
    trainer: Trainer, critic: Critic | None, machine: Machine, trainer_memory: tuple[TrainerMemory, ...]
) -> Iterator[str]:
    if machine.memory is None:
        return
    margin = trainer.memory_margin_mib * MIB
    shared = critic is not None and critic.placement == "shared"
    critics = {record.stage: record for record in trainer_memory if record.model == "critic"} if shared else {}
    for record in trainer_memory:
        if shared and record.model != "trainer":
            continue
        beside = critics.get(record.stage)
        peak = record.peak if beside is None else together(record, beside)
        if peak + margin > machine.memory:
            what = "trainer and critic" if beside else record.model
            yield (
                f"{what} rank {record.rank} (stage {record.stage}) would need {_gib(peak)} GiB and "
                f"trainer.memory_margin_mib {margin // MIB} of a GPU's {_gib(machine.memory)} GiB: {_kinds(record)}; "
                "use more ranks, more recomputation or trainer.optimizer.offload_fraction"
            )


@rule("memory.engine", about="rollout.engines")
def serves(rollout: Rollout, machine: Machine, engine_memory: tuple[EngineMemory, ...]) -> Iterator[str]:
    for engine in engine_memory if machine.memory is not None else ():
        if engine.static is not None and engine.weights > engine.static:
            yield (
                f"a rank of engine {engine.group} holds {_gib(engine.weights)} GiB of weights, and SGLang gives "
                f"weights and KV cache {_gib(engine.static)} GiB of a GPU (mem_fraction_static "
                f"{engine.static_fraction}); raise rollout.engines.tensor, or quantise (publish.quantise)"
            )
        elif engine.concurrency == 0:
            states = f" beside states of {engine.state_per_request} bytes per request" * (engine.state_per_request > 0)
            yield (
                f"engine {engine.group} has room for the keys and values of {engine.kv_tokens} tokens{states}, and one "
                f"rollout may have {rollout.longest}; raise rollout.engines.tensor or max_total_tokens, or lower "
                "rollout.sampling.max_new_tokens"
            )


@rule("memory.colocated", about="schedule.colocate")
def takes_turns(machine: Machine, colocated: ColocatedMemory | None) -> Iterator[str]:
    if machine.memory is not None and colocated is not None and colocated.margin < 0:
        yield (
            f"trainer and engine do not fit one GPU of {_gib(colocated.memory)} GiB in turns (schedule.colocate): "
            f"training takes {_gib(colocated.training)} GiB, generating {_gib(colocated.generating)}, publishing "
            f"{_gib(colocated.publishing)}; lower mem_fraction_static, split the trainer over more ranks, or set "
            "publish.staging=bucket"
        )


@rule("memory.host", about="cluster.host_memory_gib")
def fits_host(machine: Machine, trainer_memory: tuple[TrainerMemory, ...]) -> Iterator[str]:
    if machine.memory is None or machine.host_memory is None:
        return
    host = max(record.host for record in trainer_memory) * machine.per_node
    if host > machine.host_memory:
        yield (
            f"{machine.per_node} trainer ranks keep {_gib(host)} GiB in a node's host memory, and "
            f"cluster.host_memory_gib is {_gib(machine.host_memory)}; set checkpoint.asynchronous=false, lower "
            "trainer.optimizer.offload_fraction, or use more nodes"
        )


def together(policy: TrainerMemory, critic: TrainerMemory) -> int:
    """Peak of a rank that holds both, which take turns with activations."""
    states = [record.weights + record.gradients + record.optimizer for record in (policy, critic)]
    return sum(states) + max(policy.peak - states[0], critic.peak - states[1])


def _kinds(record: TrainerMemory) -> str:
    kinds = {
        "weights": record.weights,
        "gradients": record.gradients,
        "optimizer": record.optimizer,
        "activations": record.activations + max(record.head, record.work),
    }
    return ", ".join(f"{kind} {_gib(size)}" for kind, size in kinds.items())


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f}"
